"""Plots of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.errors import missing_extra


def loss_curve(records: Sequence[dict[str, Any]], unigram_entropy: float | None, file: Path) -> None:
    """Training and validation loss over steps, with the unigram entropy as a line to be under.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise missing_extra("matplotlib", "train", "plotting the loss") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    steps = [r["step"] for r in records]
    axes.plot(steps, [r["loss"] for r in records], color="#8ab4d8", linewidth=1, label="training")
    validated = [(r["step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None]
    if validated:
        axes.plot(*zip(*validated, strict=True), color="#1f4e79", marker="o", markersize=4, label="validation")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="#b5651d", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)
