"""Which layers see a sliding window of the latest tokens only, as a config.json says it. No torch.

Beltagy et al., "Longformer", arXiv 2004.05150; Jiang et al., "Mistral 7B", arXiv 2310.06825.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.models.fields import ConfigReader

_WINDOWED = {"full_attention": False, "sliding_attention": True}


def by_layer(arch: ArchSpec, read: ConfigReader, window: int | None, usual: Sequence[bool]) -> ArchSpec:
    """`arch` with the windowed layers of `layer_types`, or, without that key, those where `usual` (one per layer) is.

    A windowed layer without a window is a ModelError.
    """
    windowed = read.words("layer_types", len(usual), _WINDOWED) if "layer_types" in read else usual
    layers = tuple(layer for layer, it_is in enumerate(windowed) if it_is)
    if not layers:
        return arch
    if window is None:
        raise read.error("sliding_window", f"a window in use, which layer {layers[0]} asks for")
    return replace(arch, window=window, window_layers=None if len(layers) == len(usual) else layers)


def from_layer_on(arch: ArchSpec, read: ConfigReader, layers: int) -> ArchSpec:
    """The windows of the Qwen families: used if `use_sliding_window`, from layer `max_window_layers` on."""
    window = read.whole_or_null("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    first = read.count("max_window_layers", 28)
    return by_layer(arch, read, window, [window is not None and layer >= first for layer in range(layers)])


def everywhere(arch: ArchSpec, read: ConfigReader, window: int | None, layers: int) -> ArchSpec:
    """The windows of a family that has none or the same in every layer; `layer_types` that say other are refused."""
    plain = replace(arch, window=window)
    if by_layer(arch, read, window, [window is not None] * layers) != plain:
        raise read.error("layer_types", "the same for all layers, and sliding_attention only with a sliding_window")
    return plain
