"""The convolutional projections that open a CvT block, layer norm included, in one kernel."""
from .op import *
