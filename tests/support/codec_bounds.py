"""The largest error that each storage format may make, worked out on paper from its formula and not from its code.

A codec's bound is a function of the codec and of the numbers y [H, L, C'] fp64 that are coded: in their own basis, or
rotated. It returns for each number the largest |y - y'| that the formula allows. Rounding to nearest costs half a step,
a stored fp16 costs 2^-11 of itself and 2^-25, and what a format cannot reach costs its distance to the nearest level.
"""

import torch
from support.codec_reference import CENTROIDS

from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.codecs.floating import Fp8Codec
from kvbench.kv.codecs.integer import CentredInt8, MinMaxInteger, SymmetricInteger, ZeroPointInt4
from kvbench.kv.codecs.lloyd_max import LloydMax
from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.rotation import make_basis


def half_error(stored):
    """The largest error of a number that is stored in fp16."""
    return stored.abs() * 2.0**-11 + 2.0**-25


def blocks_of(y, group):
    """y [..., C'] as [..., blocks, group], zeros at the end, and the way back."""
    channels = y.shape[-1]
    inside = torch.nn.functional.pad(y, (0, -channels % group)).unflatten(-1, (-1, group))
    return inside, lambda bound: bound.expand_as(inside).flatten(-2)[..., :channels]


def beyond(y, low, high):
    """How far each number lies outside of what the levels reach."""
    return (low - y).clamp(min=0) + (y - high).clamp(min=0)


def fp8(codec, y):
    """Half a unit in the last place: 2^-4 of a number of 3 bits of mantissa, or of the least normal number."""
    bits, least, largest = {"e4m3": (3, 2.0**-6, 448.0), "e5m2": (2, 2.0**-14, 57344.0)}[codec.kind]
    axes = {"one": None, "tensor": (0, 1, 2), "head": (1, 2), "token_head": (2,)}[codec.scale]
    scale = torch.ones(())
    if axes is not None:
        absmax = y.abs().amax(dim=axes, keepdim=True)
        scale = torch.where(absmax == 0, 1.0, absmax / (codec.reach or largest))
    steps = (y / scale).abs()
    return scale * (steps.clamp(min=least) * 2.0 ** -(bits + 1) + beyond(steps, 0.0, largest))


def symmetric(codec, y):
    top = 2 ** (codec.bits - 1) - 1
    scale = y.abs().amax(dim=-1, keepdim=True) / top
    step = 1.0 if codec.truncate else 0.5
    if codec.half:  # the largest value is top scales, and the scale is off
        return step * (scale + half_error(scale)) + top * 2.0**-25
    return step * scale.clamp(min=1e-6)


def centred(codec, y):
    low, high = y.amin(dim=-1, keepdim=True), y.amax(dim=-1, keepdim=True)
    scale, centre = (high - low) / 255, (low + high) / 2
    # the ends are 127.5 steps from the centre
    return scale / 2 + 127.5 * half_error(scale) + half_error(centre)


def levels_about_zero(y, top, scale, scale_error):
    """Codes 0 ... top of (y / scale + z) with a whole zero point z, which is 0 ... top too."""
    low = torch.minimum(torch.maximum(y.amin(dim=-1, keepdim=True), -top * scale), torch.zeros(()))
    return scale / 2 + top * scale_error + beyond(y, low, low + top * scale)


def zero_point(codec, y):
    # the codec rounds sqrt(C') y to the model's type before it codes it: the law adds that
    root = 1.0 if codec.rotate == "none" else y.shape[-1] ** 0.5
    reach = root * (y.amax(dim=-1, keepdim=True) - y.amin(dim=-1, keepdim=True))
    scale = (reach / 15).clamp(min=1e-6) / root
    return levels_about_zero(y, 15, scale, scale * 2.0**-19)  # the lowest 4 bits of the scale's mantissa are z


def min_max_integer(codec, y):
    top, low = 2**codec.bits - 1, y.amin(dim=-1, keepdim=True)
    scale = ((y.amax(dim=-1, keepdim=True) - low) / top).clamp(min=1e-8)
    return scale / 2 + top * half_error(scale) + half_error(low)


def blocks(codec, y):
    inside, back = blocks_of(y, codec.group)
    extreme = inside.gather(-1, inside.abs().argmax(dim=-1, keepdim=True))
    if codec.bits == 8:
        scale = extreme.abs() / 127
        return back(scale / 2 + 127 * half_error(scale))
    scale = extreme.abs() / 8
    # levels are -8 ... 7 scales, where the sign is that of the extreme turned round
    toward = inside * -extreme.sign()
    return back(scale / 2 + 8 * half_error(scale) + beyond(toward, -8 * scale, 7.5 * scale))


def lloyd_max(codec, y):
    """The distance of y / |y| to the nearest centroids over sqrt(C'), times |y|: a bound of a token's length alone."""
    positive = torch.tensor(CENTROIDS.get(codec.bits - codec.inner, [0.797885]), dtype=torch.float64)
    norm, root = y.norm(dim=-1, keepdim=True), y.shape[-1] ** 0.5
    unit = y / norm.clamp(min=1e-300)
    length = (unit.abs()[..., None] - positive / root).abs().amin(dim=-1).norm(dim=-1, keepdim=True)
    length = torch.where(norm == 0, 0.0, length)
    if codec.normed:  # brought to length 1, within the angle that an error of this length can make
        length = 2 * (length.clamp(max=1).asin() / 2).sin()
    if codec.inner:  # S' of C signs is at most 2.2 C long, S Gaussian: sqrt(pi / 2) * 2.2 residuals are added
        length = (1 + (torch.pi / 2) ** 0.5 * 2.2) * length
    # 1e-8 is added to |y|, and |y| is stored in fp16; what is multiplied by it is at most 1 + length
    total = norm * length + (1 + length) * (half_error(norm) + 1e-8)
    return total.expand_as(y) / root


def fp4(codec, y):
    """A quarter of a number, which is half a unit in the last place of one bit of mantissa, or of the block's scale."""
    inside, back = blocks_of(y, codec.group)
    absmax = inside.abs().amax(dim=-1, keepdim=True)
    if codec.kind == "nv":
        g = y.abs().amax() / (6 * 448)
        most = 4 if codec.four_over_six else 6
        # a block's scale is a float of 8 bits: 2^-4 of itself, or of 2^-6, times g
        scale = absmax / most * (1 + 2.0**-4) + g * 2.0**-10
        return back(torch.maximum(inside.abs(), scale) / 4 + 6 * g * 2.0**-10)
    if codec.kind == "ocp":  # 2^(floor(log2 absmax) - 2): a fourth to an eighth, and a quarter of 8 scales is 2
        scale = (absmax / 4).clamp(min=2.0**-127)
    else:  # 2^ceil(log2(absmax / 6)), which is below a third
        scale = torch.maximum(absmax / 3, torch.tensor(2e-10))
    return back(torch.maximum(inside.abs(), scale) / 4)


BOUNDS = {
    Fp8Codec: fp8,
    SymmetricInteger: symmetric,
    CentredInt8: centred,
    ZeroPointInt4: zero_point,
    MinMaxInteger: min_max_integer,
    Blocks: blocks,
    LloydMax: lloyd_max,
    MicroscaledFp4: fp4,
}
"""The bound of each class of codecs, before its rotation."""


def grouped(y, bits, group):
    """Codes of groups of channels by minimum and maximum, both stored in fp16 (KIVI, FlexGen)."""
    last = y[..., -1:].expand(*y.shape[:-1], -y.shape[-1] % group)
    inside = torch.cat([y, last], dim=-1).unflatten(-1, (-1, group))
    low, top = inside.amin(dim=-1, keepdim=True), 2**bits - 1
    reach = inside.amax(dim=-1, keepdim=True) - low + half_error(low)
    scale = reach / top
    bound = torch.maximum((scale + half_error(scale)) / 2, half_error(low)) + top * 2.0**-25
    return bound.expand_as(inside).flatten(-2)[..., : y.shape[-1]]


def kivi(stage, half, y):
    if half == "values":
        return grouped(y, stage.bits, stage.group)
    return grouped(y.transpose(1, 2), stage.bits, stage.group).transpose(1, 2)  # groups of tokens of a channel


def flexgen(stage, half, y):
    return grouped(y, stage.bits, min(stage.group, y.shape[-1]))


def qhitter(stage, half, y):
    top = 2**stage.bits - 1
    scale = ((y.amax(dim=-1, keepdim=True) - y.amin(dim=-1, keepdim=True)) / top).clamp(min=1e-5)
    return levels_about_zero(y, top, scale, half_error(scale))


STAGE_BOUNDS = {"kivi": kivi, "flexgen": flexgen, "qhitter": qhitter}
"""The bound of each method that packs without a codec, by its id."""


def codec_bound(codec, x):
    """The largest length of the error of each token of x [H, L, C], or of each number where nothing is rotated."""
    assert type(codec) in BOUNDS, (
        f"{type(codec).__module__}.{type(codec).__name__} states no bound of its error: write in "
        "tests/support/codec_bounds.py a function of (codec, y) that returns the largest |y - y'| its formula allows, "
        "and name it in BOUNDS"
    )
    y, length = x.double(), x.double().norm(dim=-1, keepdim=True)
    if codec.rotate == "none":
        slack = 2.0**-20 * x.double().abs().amax(dim=-1, keepdim=True)
        bound = (BOUNDS[type(codec)](codec, y) + slack).expand_as(y)
        return bound.norm(dim=-1, keepdim=True) if isinstance(codec, LloydMax) else bound
    y = y @ make_basis(x.shape[-1], codec.rotate, codec.block, torch.device("cpu")).double()
    bound = BOUNDS[type(codec)](codec, y).expand_as(y).norm(dim=-1, keepdim=True) + 2.0**-18 * length
    if isinstance(codec, ZeroPointInt4):  # rounded to the model's type once it is rotated
        bound = bound + length * torch.finfo(x.dtype).eps
    return bound


def stage_bound(stage, half, x):
    """The largest error of each number of keys or values x [H, L, C] that a method packs without a codec."""
    assert stage.id in STAGE_BOUNDS, (
        f"method {stage.id} packs without a codec and states no bound of its error: write in "
        "tests/support/codec_bounds.py a function of (stage, half, y) that returns the largest |y - y'| its formula "
        "allows, and name it in STAGE_BOUNDS"
    )
    y = x.double()
    return STAGE_BOUNDS[stage.id](stage, half, y) + 2.0**-20 * y.abs().amax()


def mean_error(codec):
    """The largest share of |x|^2 that a codec of TurboQuant loses on the mean of Gaussian tokens.

    arXiv 2504.19874, theorems 1 and 2: sqrt(3) pi / 2 * 4^-b; of its inner products, pi / 2 of that at b - 1 bits.
    """
    share = 3**0.5 * torch.pi / 2 * 4.0 ** -(codec.bits - codec.inner)
    return share * torch.pi / 2 if codec.inner else share


def errors(x, packed, bound):
    """The errors that ``bound`` limits: of each number, or of each token's length."""
    error = (packed.dequantise(torch.float32).double() - x.double()).abs()
    return error if bound.shape == error.shape else error.norm(dim=-1, keepdim=True)
