"""The look of a method: one colour, one marker and one printed name in every figure, in the reports and on the site.

This module imports no drawing package, so that pages without pictures can use it, too.
"""

from __future__ import annotations

import colorsys
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

BLUE, VERMILLION, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#C06C9B", "#3D9BD1"
AMBER, VIOLET, BROWN, OLIVE, MAGENTA = "#B87F00", "#7570B3", "#A6611A", "#7F8C2A", "#AA4499"
CRIMSON, INDIGO, MOSS, TEAL, GREY = "#D1495B", "#5B6DCD", "#4F7F2F", "#2A9D8F", "#777777"


class MethodRow(NamedTuple):
    """A row of METHODS: the drawing and the name of one method.

    color: the colour as six hexadecimal digits behind a #.
    marker: the marker in matplotlib's letters.
    name: the printed name.
    """

    color: str
    marker: str
    name: str


METHODS: dict[str, MethodRow] = {
    "full": MethodRow("#8C8C8C", "*", "full cache"),
    "adakv": MethodRow(SKY, "D", "AdaKV"),
    "asvd": MethodRow(INDIGO, "D", "ASVD"),
    "cake": MethodRow(MOSS, "h", "CAKE"),
    "chai": MethodRow(MOSS, "X", "CHAI"),
    "chunkkv": MethodRow(AMBER, "v", "ChunkKV"),
    "expectedattention": MethodRow(CRIMSON, "<", "ExpectedAttention"),
    "flexgen": MethodRow(AMBER, "P", "FlexGen"),
    "fp8": MethodRow(BROWN, "^", "FP8"),
    "h2o": MethodRow(VERMILLION, "s", "H2O"),
    "int4": MethodRow(BROWN, "D", "INT4"),
    "int8": MethodRow(BROWN, "v", "INT8"),
    "keydiff": MethodRow(CRIMSON, "s", "KeyDiff"),
    "keynorm": MethodRow(OLIVE, "o", "KeyNorm"),
    "kivi": MethodRow(VIOLET, "X", "KIVI"),
    "kvzip": MethodRow(MAGENTA, "o", "KVzip"),
    "l1": MethodRow(BROWN, "o", "L1 channels"),
    "l2": MethodRow(BROWN, "s", "L2 channels"),
    "mxfp4": MethodRow(MOSS, "s", "MXFP4"),
    "nvfp4": MethodRow(MOSS, "o", "NVFP4"),
    "palu": MethodRow(INDIGO, "s", "Palu"),
    "pyramidkv": MethodRow(MAGENTA, ">", "PyramidKV"),
    "q4_0": MethodRow(OLIVE, "^", "q4_0"),
    "q4_0_h": MethodRow(OLIVE, "s", "q4_0 rotated"),
    "q8_0": MethodRow(OLIVE, "v", "q8_0"),
    "qhitter": MethodRow(CRIMSON, "p", "Q-Hitter"),
    "quant": MethodRow(AMBER, "X", "quantisation"),
    "random": MethodRow(GREY, "x", "random tokens"),
    "firsttokens": MethodRow(GREY, "+", "first tokens"),
    "refreekv": MethodRow(OLIVE, "d", "ReFreeKV"),
    "scissorhands": MethodRow(TEAL, "v", "Scissorhands"),
    "snapkv": MethodRow(BLUE, "o", "SnapKV"),
    "streamingllm": MethodRow(GREEN, "^", "StreamingLLM"),
    "think": MethodRow(PINK, "D", "ThinK"),
    "thinkv": MethodRow(PINK, "v", "ThinK values"),
    "tova": MethodRow(SKY, "v", "TOVA"),
    "turboquant": MethodRow(OLIVE, "p", "TurboQuant"),
    "twilight": MethodRow(INDIGO, "^", "Twilight"),
    "uncomp": MethodRow(TEAL, "P", "UNComp"),
    "uncomp-group": MethodRow(TEAL, "<", "UNComp groups"),
    "uncomp-stage": MethodRow(TEAL, ">", "UNComp stages"),
    "vatp": MethodRow(MAGENTA, "d", "VATP"),
}
"""Method -> colour, marker, printed name. Colours have a contrast of 3 to white and to a dark page."""

_IDS = {method: method for method in METHODS} | {row.name.lower(): method for method, row in METHODS.items()}
"""The id of each method by the names that a label may use: the id itself, or the printed name in lower case."""
LINES = ("-", "--", "-.", ":")
DERIVED_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "d", "p", "h", "P", "X")
"""The markers of methods that the table lacks."""
MOST_LUMINANCE = 0.3
"""The relative luminance (WCAG) of a colour whose contrast to white is 3."""
FULL_NAMES = ("full", "full cache")
PART = re.compile(r"\s*([\w.:-]+)(.*?)\s*$", re.DOTALL)
"""A part of a label between plus signs: a method, and the text with its options."""


@dataclass(frozen=True)
class Look:
    """The drawing and the name of a method.

    color: the colour as six hexadecimal digits behind a #.
    marker: the marker in matplotlib's letters.
    name: the printed name, with the label's options.
    line: matplotlib's line style.
    hollow: True where the marker has no filling.
    """

    color: str
    marker: str
    name: str
    line: str = "-"
    hollow: bool = False


def look_of(label: str) -> Look:
    """Return the look of a method, of a combination or of a row's label: ``snapkv+think kv_ratio=0.25``.

    A combination has the colour of its first method, the marker of its last one without filling, and a dashed line.
    A method that the table lacks has a colour and a marker derived from its name, which never change.
    """
    rows = [_find_row(method) for method, _ in _split_label(label)]
    first, last = rows[0], rows[-1]
    name = name_methods(label)
    if len(rows) == 1:
        return Look(first.color, first.marker, name)
    return Look(first.color, last.marker, name, line="--", hollow=True)


def looks_of(labels: Sequence[str]) -> dict[str, Look]:
    """Return the looks of the labels in one picture, by label.

    Labels of one method share its colour and marker, and differ in their lines.
    """
    looks: dict[str, Look] = {}
    # how many of the labels so far look the same but for their line
    used: dict[tuple[str, str, bool], int] = {}
    for label in dict.fromkeys(labels):
        look = look_of(label)
        key = (look.color, look.marker, look.hollow)
        count = used.get(key, 0)
        used[key] = count + 1
        if count:
            # the first label of a method has its own line. The others take the next ones, and every second label of the
            # method changes the filling
            line = LINES[(LINES.index(look.line) + count) % len(LINES)]
            hollow = look.hollow if count % 2 == 0 else not look.hollow
            look = replace(look, line=line, hollow=hollow)
        looks[label] = look
    return looks


def name_methods(label: str) -> str:
    """Return a label with the methods' printed names: ``snapkv+think ratio=0.4`` is SnapKV + ThinK ratio=0.4."""
    if label.lower() in FULL_NAMES:
        return METHODS["full"].name
    return " + ".join(_find_row(method).name + options for method, options in _split_label(label))


def _split_label(label: str) -> list[tuple[str, str]]:
    """Return (method, the text with its options) of each part of a label between plus signs, at least one.

    A method of the table is given by its id, any other by the label's own word.
    """
    if label.lower() in FULL_NAMES:
        return [("full", "")]
    parts = []
    for part in label.split("+"):
        match = PART.match(part)
        # a part that names no method, such as an empty one, is printed as it stands
        if match is None:
            parts.append((part, ""))
            continue
        method, options = match.groups()
        # a label that is printed already, as KIVI 4/4, has the printed name of its method
        parts.append((_IDS.get(method.lower(), method), options))
    return parts


def _find_row(method: str) -> MethodRow:
    if method in METHODS:
        return METHODS[method]
    name = method
    # kvpress's own implementation of a method of the table: kvpress:snapkv is printed as kvpress SnapKV
    press = method.removeprefix("kvpress:")
    if press != method and press in METHODS:
        name = f"kvpress {METHODS[press].name}"
    # the digest never changes: its first two bytes choose the colour, the third one the marker
    digest = hashlib.sha256(method.encode()).digest()
    color = _derive_color(int.from_bytes(digest[:2]))
    marker = DERIVED_MARKERS[digest[2] % len(DERIVED_MARKERS)]
    return MethodRow(color, marker, name)


def _derive_color(number: int) -> str:
    """Return a colour of a hue that ``number`` chooses, dark enough to be seen on white."""
    hue = number % 360 / 360
    lightness = 0.45
    # this ends: at lightness 0 every hue is black, whose luminance is 0
    while True:
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.6)
        color = "#" + "".join(f"{round(255 * channel):02X}" for channel in (red, green, blue))
        if luminance(color) <= MOST_LUMINANCE:
            return color
        lightness -= 0.02


def luminance(color: str) -> float:
    """Return the relative luminance (WCAG) of a colour like #0072B2."""
    # L = 0.2126 R + 0.7152 G + 0.0722 B, where each channel is turned from sRGB into linear light first
    total = 0.0
    # (place of the channel's two hexadecimal digits behind the #, weight)
    for start, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        value = int(color[start : start + 2], 16) / 255
        # sRGB's curve is a line near black, and a power above
        if value > 0.03928:
            linear = ((value + 0.055) / 1.055) ** 2.4
        else:
            linear = value / 12.92
        total += weight * linear
    return total
