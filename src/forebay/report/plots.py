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
    plt = _pyplot("plotting the loss")
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


def pareto(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Step time against device memory of what a plan was chosen from; the first row is the plan.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    plt = _pyplot("plotting step time against memory")
    gib = 2**30
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for fits, color, label in ((True, "#1f4e79", "fits"), (False, "#b5651d", "does not fit")):
        some = [r for r in rows[1:] if r["fits"] == fits]
        points = [[r["device_bytes"] / gib for r in some], [r["step_time_s"] for r in some]]
        axes.scatter(*points, s=24, color=color, label=label)
        for r in some:
            axes.annotate(
                r["name"],
                (r["device_bytes"] / gib, r["step_time_s"]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
    plan = rows[0]
    axes.scatter(
        [plan["device_bytes"] / gib], [plan["step_time_s"]], s=110, marker="*", color="#2e8b57", label="the plan"
    )
    axes.set_xlabel("device memory, GiB")
    axes.set_ylabel("predicted step time, s")
    if max(r["device_bytes"] for r in rows) > 8 * min(r["device_bytes"] for r in rows):
        axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)


def _pyplot(purpose: str) -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise missing_extra("matplotlib", "train", purpose) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
