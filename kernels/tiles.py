"""The channels of a token in a kernel: one or several tiles [tokens, heads, channels] of one shape.

Sides of Triton's tiles are powers of two. Heads of 160 channels would leave 3 of 8 lanes of a tile of 256 idle; five
tiles of 32 they fill. So a row is a tuple of tiles here, and these functions do with rows what operators do with a
tile. All its tiles lie in registers alike, so sums over a head add tiles first and cross threads once.
"""

import triton
import triton.language as tl


def tiles_of(width: int) -> tuple[int, int]:
    """How the channels of a head of this width are cut: channels of a tile, 8 at least of several; and tiles.

    One, or three quarters of it, or five eighths, as tiles of a quarter or an eighth.
    """
    padded = triton.next_power_of_2(width)
    for tiles, side in ((5, padded // 8), (3, padded // 4)):
        if side >= 8 and width <= tiles * side:
            return side, tiles
    return padded, 1


@triton.jit
def channels_of_a_token(H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, TILES: tl.constexpr):
    """Offsets of a token's channels, head by head, and which of them exist: rows [1, HP, KP] twice."""
    h = tl.arange(0, HP)[:, None]
    channel = ()
    inside = ()
    for i in tl.static_range(TILES):
        k = i * KP + tl.arange(0, KP)[None, :]
        channel += ((h * K + k)[None],)
        inside += (((h < H) & (k < K))[None],)
    return channel, inside


@triton.jit
def places(t, there, channel, inside, D: tl.constexpr, H: tl.constexpr, HP: tl.constexpr):
    """Of the tokens t [TT]: offsets of their channels and which exist, rows; of their heads, [TT, HP]."""
    h = tl.arange(0, HP)[None, :]
    row = ()
    for i in tl.static_range(len(channel)):
        row += (t[:, None, None] * D + channel[i],)
    return row, only(inside, there), t[:, None] * H + h, there[:, None] & (h < H)


@triton.jit
def only(inside, there):
    """Masks of a row where the tokens are there, a bool [TT] or one for all."""
    masks = ()
    for i in tl.static_range(len(inside)):
        masks += (inside[i] & there[:, None, None],)
    return masks


@triton.jit
def load(ptr, at, mask):
    """The row at these offsets, as it is stored; 0 outside the mask."""
    row = ()
    for i in tl.static_range(len(at)):
        row += (tl.load(ptr + at[i], mask=mask[i], other=0.0),)
    return row


@triton.jit
def store(ptr, at, row, mask):
    for i in tl.static_range(len(at)):
        tl.store(ptr + at[i], row[i], mask=mask[i])


@triton.jit
def floats(row):
    """In float32."""
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i].to(tl.float32),)
    return out


@triton.jit
def add(a, b):
    out = ()
    for i in tl.static_range(len(a)):
        out += (a[i] + b[i],)
    return out


@triton.jit
def times(a, b):
    """Channel by channel."""
    out = ()
    for i in tl.static_range(len(a)):
        out += (a[i] * b[i],)
    return out


@triton.jit
def scaled(a, by):
    """Every channel of a row times its head's number, by [TT, HP] (or 1 for either)."""
    out = ()
    for i in tl.static_range(len(a)):
        out += (a[i] * by[:, :, None],)
    return out


@triton.jit
def inner(a, b):
    """The inner products of two rows by head, [TT, HP]."""
    products = a[0] * b[0]
    for i in tl.static_range(1, len(a)):
        products += a[i] * b[i]
    return tl.sum(products, 2)


@triton.jit
def mean_square(a, D: tl.constexpr):
    """Over all channels, [TT]."""
    return tl.sum(inner(a, a), 1) / D
