"""Bind chains to calibrations: find the missing ones, compute them, and reuse them."""

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

from kvbench.base.numbers import ceil_div
from kvbench.base.progress import progress
from kvbench.engine.calibration import files
from kvbench.engine.calibration import text as calibration_text
from kvbench.engine.draws import seeded
from kvbench.engine.prefill import make_observer
from kvbench.engine.weights_digest import check_weights, digest_weights
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import CalibrationRun, Request
from kvbench.methods.core.stage import Stage

DEFAULT_FOLDER = "calibration"  # below the results folder
MIB = 2**20


@dataclass(frozen=True)
class Session:
    """One model's calibrations: it finds those on disk, and computes and keeps those that are missing.

    folder: the folder in which calibrations are kept.
    identity: facts that identify the model, by name. Calibrations of other facts are not used.
    tokenizer: the model's tokenizer.
    context: the most tokens that the model can read at once; None if unknown.
    own_corpus: True if calibrations read the tiny model's own corpus.
    text: the user's text file to calibrate on; None: another text is chosen (see ``text.find``).
    data: the data folder, which may hold WikiText-2; None: the default one.
    """

    folder: Path
    identity: Mapping[str, object]
    tokenizer: Any
    context: int | None = None
    own_corpus: bool = False
    text: str | None = None
    data: str | None = None

    def request(self, stage: Stage) -> Request | None:
        """Return the request for the calibration that a stage needs, or None if it needs none. Nothing is computed."""
        recipe = stage.recipe()
        if recipe is None:
            return None
        source = self.source
        # a window is at most as long as the context, and as the text's limit if the recipe states no number of tokens
        limits = [self.context]
        if recipe.tokens is None:
            limits.append(source.limit)
        longest = min((limit for limit in limits if limit is not None), default=None)
        # the key in a calibration's file name has a short hash of the model's identity
        identity_json = json.dumps(dict(self.identity), sort_keys=True, default=str)
        model_hash = hashlib.sha256(identity_json.encode()).hexdigest()[:16]
        return Request(recipe.fill_tokens(longest), model=model_hash, text=source.name, text_sha256=source.sha256)

    def requests(self, chain: Chain) -> dict[str, Request]:
        """Return the calibration requests of a chain by stage id, without stages that need no calibration."""
        requests: dict[str, Request] = {}
        for stage in chain.stages:
            request = self.request(stage)
            if request is not None:
                requests[stage.id] = request
        return requests

    def chain_identity(self, chain: Chain) -> dict[str, Any]:
        """Return the facts by which a chain is part of a cell's identity, with those of the calibrations it needs."""
        identity = chain.identity()
        requests = self.requests(chain)
        # a chain without calibrations gets no such key, so that its cells keep their ids
        if requests:
            identity["calibration"] = {stage: request.identity() for stage, request in requests.items()}
        return identity

    def path(self, request: Request) -> Path:
        """Return the path of the record of a request's calibration."""
        return files.path_of(self.folder, request)

    def missing(self, chain: Chain) -> list[Request]:
        """Return the chain's requests whose calibrations are not on disk. Their first use computes them."""
        return [request for request in self.requests(chain).values() if not self.path(request).exists()]

    def bind(self, chain: Chain, model: PreTrainedModel, quiet: bool = False) -> Chain:
        """Return the chain with every stage bound to its calibration, which is read from its file or computed now."""
        if not self.requests(chain):
            return chain
        return replace(chain, stages=tuple(self._bind_stage(stage, model, quiet) for stage in chain.stages))

    @cached_property
    def source(self) -> calibration_text.CalibrationText:
        """The text that calibrations read."""
        return calibration_text.find(self.own_corpus, self.text, self.data)

    def _bind_stage(self, stage: Stage, model: PreTrainedModel, quiet: bool) -> Stage:
        """Return the stage bound to its calibration, which is read from its file or computed now.

        A stage that needs no calibration is returned as it is. Raises UsageError if the file's calibration was computed
        on other weights.
        """
        request = self.request(stage)
        if request is None:
            return stage
        if self.path(request).exists():
            calibration = files.load(self.folder, request)
        else:
            tensors = self._compute(stage, request, model, quiet)
            calibration = files.save(self.folder, request, tensors, digest_weights(model))
        check_weights(calibration, model, self.path(request))
        return stage.calibrated(calibration)

    def _compute(self, stage: Stage, request: Request, model: PreTrainedModel, quiet: bool) -> dict[str, Tensor]:
        """Return the tensors of the calibration that ``request`` asks for, computed by ``stage`` on ``model``.

        Unless ``quiet``, the memory and disk space that it takes are printed on stderr first.
        """
        recipe = request.recipe
        # ``request`` has filled in the windows' length
        assert recipe.tokens is not None
        # windows are drawn by a seed, so that a calibration can be computed again
        windows = self.source.windows(self.tokenizer, recipe.samples, recipe.tokens)
        if not quiet:
            self._print_cost(stage, request, model)
        label = f"calibrate {stage.id}"
        steps = recipe.samples + stage.calibration_steps(model)
        with progress({label: steps}, quiet, unit="steps of calibration") as tick:

            def tick_step() -> None:
                tick(label, 1)

            run = CalibrationRun(model, windows, recipe, tick=tick_step, observe=make_observer(model))
            with seeded():
                return stage.calibrate(run)

    def _print_cost(self, stage: Stage, request: Request, model: PreTrainedModel) -> None:
        """Print to stderr what a calibration reads, the memory and disk space that it takes, and where it is kept."""
        recipe = request.recipe
        memory_bytes, disk_bytes = stage.calibration_bytes(model)
        memory, disk = ceil_div(memory_bytes, MIB), ceil_div(disk_bytes, MIB)
        cost = ""
        if memory:
            cost = f"{memory:,} MiB of statistics beside the model, {disk:,} MiB on disk; "
        print(
            f"kvbench: calibrating {stage.id}: {recipe.samples} samples of {recipe.tokens} tokens, {request.text}; "
            f"{cost}kept in {self.folder}",
            file=sys.stderr,
        )
