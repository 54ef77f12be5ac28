"""Functions of torch that leave channels where they are, by name."""

# They treat all channels alike, each by itself or with all others, as a softmax does. In place, their names end in `_`.
_KEEPING = """
add radd iadd sub rsub isub mul rmul imul div rdiv idiv truediv rtruediv itruediv true_divide floor_divide remainder
fmod pow rpow ipow multiply subtract divide neg negative abs sign exp expm1 log log1p log2 sqrt rsqrt square
reciprocal sin cos tan atan erf floor ceil round trunc clamp clamp_min clamp_max clip maximum minimum fmax fmin
where lerp addcmul addcdiv masked_fill nan_to_num hypot eq ne lt le gt ge logical_and logical_or logical_not and or
invert isnan isfinite relu relu6 leaky_relu rrelu elu selu celu gelu silu mish sigmoid logsigmoid hardsigmoid
hardswish hardtanh hardshrink softshrink tanhshrink threshold softplus softsign tanh softmax softmin log_softmax
normalize gumbel_softmax rms_norm log_sigmoid dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
feature_alpha_dropout avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d lp_pool2d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d interpolate upsample pad fill zero copy bernoulli expand expand_as broadcast_to repeat reshape
view view_as reshape_as contiguous to type type_as float double half bfloat16 int long bool clone detach data real
requires_grad zeros_like ones_like full_like empty_like rand_like randn_like alias
"""
KEEPING = frozenset(_KEEPING.split())
# What they make has no channels, though a tensor says where it lies.
MAKING = frozenset({"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"})
