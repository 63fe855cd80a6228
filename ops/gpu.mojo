"""The ops that only a GPU runs; a build for a CPU has none of them."""
from .attention.linear import *
from .bmm.norm import *
from .conv2d.chain import *
from .conv2d.mean import *
from .depthwise_input_grad import *
from .mlp import *
from .row_moments import *
from .sparse_conv2d.packed import *
from .stem import *
from .token_linear import *
