"""The ops of maxvision's graphs, loaded through MAX's `custom_extensions`."""
from .attention import *
from .bmm import *
from .class_token import *
from .concat import *
from .conv2d import *
from .depthwise_qkv import *
from .gather_rows import *
from .gpu import *
from .group_norm import *
from .layernorm import *
from .normalize import *
from .pointwise import *
from .pool import *
from .reduce import *
from .roll import *
from .rows import *
from .sparse_conv2d import *
