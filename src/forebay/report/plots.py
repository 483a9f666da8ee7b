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
    """Step time (per sequence, where batches differ) against device memory of what a plan was chosen from.

    The first row is the plan; the others are numbered, their names beside the axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    plt = _pyplot("plotting step time against memory")
    gib = 2**30
    several = len({r["batch"] for r in rows}) > 1

    def place(row: dict[str, Any]) -> tuple[float, float]:
        seconds = row["step_time_s"]
        return row["device_bytes"] / gib, 1e3 * seconds / row["batch"] if several else seconds

    figure, axes = plt.subplots(figsize=(10, 5), dpi=120, layout="constrained")
    for fits, color, label in ((True, "#1f4e79", "fits"), (False, "#b5651d", "does not fit")):
        places = [place(r) for r in rows[1:] if r["fits"] == fits]
        if places:
            axes.scatter(*zip(*places, strict=True), s=24, color=color, label=label)
    for number, row in enumerate(rows[1:], 1):
        axes.annotate(str(number), place(row), xytext=(3, 3), textcoords="offset points", fontsize=8)
    axes.scatter(*place(rows[0]), s=110, marker="*", color="#2e8b57", label="this plan")
    names = "\n".join(f"{number:>2}  {row['name']}" for number, row in enumerate(rows[1:], 1))
    axes.text(1.02, 1.0, names, transform=axes.transAxes, fontsize=8, va="top", family="monospace")
    axes.set_xlabel("device memory, GiB")
    axes.set_ylabel("predicted time of a sequence, ms" if several else "predicted step time, s")
    if max(r["device_bytes"] for r in rows) > 8 * min(r["device_bytes"] for r in rows):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
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
