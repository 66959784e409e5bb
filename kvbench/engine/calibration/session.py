"""The binding of chains to calibrations: finding those a model lacks, computing them, and reusing them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.progress import progress
from kvbench.engine.calibration import files
from kvbench.engine.calibration import text as calibration_text
from kvbench.engine.prefill import observer
from kvbench.engine.weights_digest import check_weights, weights_of
from kvbench.methods.core.base import Stage
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.foreign import is_own
from kvbench.methods.core.recipe import CalibrationRun, Request
from kvbench.methods.core.walls import contained

DEFAULT_FOLDER = "calibration"  # below the results folder
MIB = 2**20


@dataclass(frozen=True)
class Session:
    """One model's calibrations, on disk and still to be computed.

    folder: the folder in which calibrations are kept.
    identity: what identifies the model.
    tokenizer: the model's tokenizer.
    context: the most tokens that the model can read at once; None if that is not known.
    own_corpus: whether calibrations read the tiny model's own corpus.
    text: a text file of the user's to calibrate on.
    data: the data folder, which may hold WikiText-2.
    """

    folder: Path
    identity: Mapping[str, Any]
    tokenizer: Any
    context: int | None = None
    own_corpus: bool = False
    text: str | None = None
    data: str | None = None

    def request(self, stage: Stage) -> Request | None:
        """Return the stage's request for a calibration, or None if it needs none. Nothing is computed."""
        recipe = stage.recipe()
        if recipe is None:
            return None
        source = self.source
        longest = self.context if source.limit is None or recipe.tokens is not None else source.limit
        if longest is not None and self.context is not None:
            longest = min(longest, self.context)
        settled = recipe.settled(longest)
        model = hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True, default=str).encode()).hexdigest()[:16]
        return Request(settled, model, source.name, source.sha256)

    def requests(self, chain: Chain) -> dict[str, Request]:
        """Return the calibration requests of a chain by stage id; stages that need no calibration are left out."""
        requests = {s.id: self.request(s) for s in chain.stages}
        return {name: r for name, r in requests.items() if r is not None}

    def chain_identity(self, chain: Chain) -> dict[str, Any]:
        """Return the chain's part in a cell's identity, with the identities of its calibration requests."""
        identity, requests = chain.identity(), self.requests(chain)
        return {**identity, "calibration": {k: r.identity() for k, r in requests.items()}} if requests else identity

    def path(self, request: Request) -> Path:
        """Return the path of the record of a request's calibration."""
        return files.path_of(self.folder, request)

    def missing(self, chain: Chain) -> list[Request]:
        """Return the chain's requests whose calibrations are not on disk: the first use computes them."""
        return [r for r in self.requests(chain).values() if not self.path(r).exists()]

    def bind(self, chain: Chain, model: PreTrainedModel, quiet: bool = False) -> Chain:
        """Return the chain with every stage bound to its calibration, read from its file or computed now."""
        if not self.requests(chain):
            return chain
        return replace(chain, stages=tuple(self._bound(s, model, quiet) for s in chain.stages))

    @cached_property
    def source(self) -> calibration_text.CalibrationText:
        """The text that calibrations read."""
        return calibration_text.find(self.own_corpus, self.text, self.data)

    def _bound(self, stage: Stage, model: PreTrainedModel, quiet: bool) -> Stage:
        request = self.request(stage)
        if request is None:
            return stage
        if self.path(request).exists():
            calibration = files.load(self.folder, request)
        else:
            tensors = self._compute(stage, request, model, quiet)
            calibration = files.save(self.folder, request, tensors, weights_of(model))
        check_weights(calibration, model, self.path(request))
        return stage.calibrated(calibration)

    def _compute(self, stage: Stage, request: Request, model: PreTrainedModel, quiet: bool) -> dict[str, Tensor]:
        recipe = request.recipe
        assert recipe.tokens is not None
        windows = self.source.windows(self.tokenizer, recipe.samples, recipe.tokens)
        if not quiet:
            memory, disk = (-(-b // MIB) for b in stage.calibration_bytes(model))
            cost = f"{memory:,} MiB of statistics beside the model, {disk:,} MiB on disk; " if memory else ""
            print(
                f"kvbench: calibrating {stage.id}: {recipe.samples} samples of {recipe.tokens} tokens, {request.text}; "
                f"{cost}kept in {self.folder}",
                file=sys.stderr,
            )
        label = f"calibrate {stage.id}"
        steps = recipe.samples + stage.calibration_steps(model)
        with progress({label: steps}, quiet, unit="steps of calibration") as tick:
            run = CalibrationRun(model, windows, recipe, lambda: tick(label, 1), observer(model))
            with contained(stage.id, not is_own(type(stage).__module__), seed=0, watched=False):
                return stage.calibrate(run)
