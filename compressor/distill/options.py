"""``distill_scales`` as a recipe spells it."""

from __future__ import annotations

from pydantic import Field

from compressor.passes.base import PassOptions

NAME = "distill_scales"


class Options(PassOptions):
    """Options of distill_scales; the seed is the run's."""

    epochs: float = Field(1.0, gt=0, description="passes over the calibration windows")
    batch: int = Field(1, ge=1, description="windows per step")
    lr: float = Field(2e-3, gt=0, description="peak learning rate: relative change of a scale per step")
    norm_lr: float = Field(1e-3, ge=0, description="the same for norm weights; 0 leaves them")
    checks: int = Field(6, ge=1, description="how often held-out windows are scored")
    patience: int = Field(3, ge=1, description="checks without gain that end training")
    max_seconds: float | None = Field(None, gt=0, description="end training after this time; other bytes each run")
