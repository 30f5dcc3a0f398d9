"""What only TensorBoard shows: grouped charts, pictures of the loop, texts, hyper-parameters.

Scalars go through DeepSpeed's monitor (`pretrain.monitor.run_log`), which knows other services as well.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.tensorboard.summary import hparams

from deeploop_model.loop_health import PER_BLOCK, PER_ROUND, LoopHealth
from pretrain.config import RunConfig
from pretrain.monitor.heat_map import heat_map
from pretrain.monitor.run_log import OVER_BLOCKS

Writer = Any  # torch.utils.tensorboard.SummaryWriter carries no types
Layout = dict[str, dict[str, list[Any]]]

PICTURES_APART = 1.1
"""A picture of the loop follows once there are this many times the steps of the one before: 73 from 100 to 100,000."""
SHOWN_ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHOWN_BLOCKS = (0, 1, 3, 5, 11, 23, 47)
"""Lines of a chart, as far as a run has them. TensorBoard tells the lines of one run apart by markers only, so they
must be few; and it adds the layouts of all runs up, so they must not depend on the run."""
TITLES = {
    "state_norm": "root mean square of the states",
    "state_change": "relative change of states from the round before",
    "state_cosine": "cosine with the states of the round before",
    "attention_entropy": "attention entropy, nats",
    "attention_logit": "largest attention logit",
    "loss": "loss if the loop ended after the round",
    "prediction_kl": "KL from the predictions of the round before, nats",
}


class Dashboard:
    """Writes beside DeepSpeed's scalars, into the same files.

    Args:
        writer: DeepSpeed's, or None where TensorBoard is off or this is not rank 0.
        shown: text that tells the run, as YAML.
    """

    def __init__(self, writer: Writer | None, config: RunConfig, shown: str) -> None:
        self._writer = writer
        self._pictured = 0
        if writer is None:
            return
        writer.add_custom_scalars(layout())
        writer.add_text("configuration", as_code(shown))
        shown_with = {"validation/loss": 0.0, "train/loss": 0.0}  # tags: their values are the run's own points
        for summary in hparams(hyperparameters(config), shown_with):  # type: ignore[no-untyped-call]
            writer.file_writer.add_summary(summary)

    def loop(self, step: int, health: LoopHealth, *, last: bool) -> None:
        """Pictures of [round][block] quantities, for some of the measurements."""
        if self._writer is None or (step < PICTURES_APART * self._pictured and not last):
            return
        self._pictured = step
        with contextlib.suppress(OSError):  # a full disk costs pictures, not the run
            for name, values in health.per_block.items():
                self._writer.add_image(f"loop/{name}", heat_map(TITLES[name], values), step, dataformats="HWC")

    def sample(self, step: int, text: str) -> None:
        """Text that the model wrote after `step` steps."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.add_text("sample", as_code(text), step)
                self._writer.flush()


def layout() -> Layout:
    """Charts by category, as patterns over tags."""
    rounds = "round(" + "|".join(f"{r:02d}" for r in SHOWN_ROUNDS) + ")$"
    blocks = "(" + "|".join(str(k) for k in SHOWN_BLOCKS) + ")"
    loop = {TITLES[name]: lines(f"loop_{name}/{rounds}") for name in PER_ROUND}
    loop |= {f"{TITLES[name]}, {OVER_BLOCKS[name]}": lines(f"loop_{name}/all/{rounds}") for name in PER_BLOCK}
    return {
        "1 learning": {
            "loss, nats per token": lines("train/loss$", "validation/loss$"),
            "perplexity": lines("train/perplexity$", "validation/perplexity$"),
            "bits per byte": lines("train/bits_per_byte$", "validation/bits_per_byte$"),
            "learning rate": lines("train/lr$"),
            "gradient norm before clipping": lines("train/grad_norm$"),
        },
        "2 loop health": loop,
        "3 visits' gradients": {
            "kappa_R, attention": lines(f"visits/kappa/blocks.{blocks}.attention$"),
            "kappa_R, feed-forward": lines(f"visits/kappa/blocks.{blocks}.feed_forward$"),
            "stability number, attention": lines(f"visits/stability/blocks.{blocks}.attention$"),
            "stability number, feed-forward": lines(f"visits/stability/blocks.{blocks}.feed_forward$"),
        },
        "4 gradient norms": {
            "attention": lines(f"grad_norm/blocks.{blocks}.attention$"),
            "feed-forward": lines(f"grad_norm/blocks.{blocks}.feed_forward$"),
            "outside of the loop": lines("grad_norm/(?!blocks)"),
        },
        "5 speed": {
            "tokens per second": lines("train/tokens_per_second$", "speed/tokens_per_second_per_device$"),
            "utilisation (MFU: model FLOPs; HFU: with recomputation)": lines("speed/mfu$", "speed/hfu$"),
            "seconds of a step": lines("time/(step|data|forward|backward|optimizer|communication)$"),
            "seconds beside a step": lines("time/(validation|checkpoint|loop_health)$"),
            "memory, GiB": lines("memory/.*"),
        },
        "6 what should not happen": {"since the first step": lines("events/.*")},
    }


def lines(*patterns: str) -> list[Any]:
    return ["Multiline", list(patterns)]


def hyperparameters(config: RunConfig) -> dict[str, bool | int | float | str]:
    """The values that runs are compared by, by their dotted keys; and K, N, R, alpha, beta, which sort to the front:
    the tab shows five columns at first."""
    found: dict[str, bool | int | float | str] = {}
    for section in ("model", "train", "optimizer", "schedule"):
        for key, value in vars(getattr(config, section)).items():
            if value is not None and value != ():
                found[f"{section}.{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    model, rule = config.model, config.model.rule
    return found | {
        "K": model.num_blocks,
        "N": model.unrolled_depth,
        "R": model.num_rounds,
        "alpha": rule.alpha,
        "beta": rule.beta,
    }


def as_code(text: str) -> str:
    """A block of Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
