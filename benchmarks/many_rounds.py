"""What R costs: allocated memory and step time by recompute policy, precision of gradients and states. On the CPU.

python -m benchmarks.many_rounds memory
python -m benchmarks.many_rounds precision
python -m benchmarks.many_rounds states
python -m benchmarks.many_rounds time
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.allocation import allocated
from benchmarks.engine_step import take_turns
from deeploop_model import DeepLoopConfig, DeepLoopModel, preset
from deeploop_model.recompute import POLICIES
from deeploop_model.round_states import RoundStates
from deeploop_model.visit_gradients import VisitPass

ROUNDS = (1, 8, 16, 32, 64)


def memory() -> None:
    """Bytes as hidden states of B*T*d 16-bit numbers: kept between the passes / at most at once."""
    print("| recompute | " + " | ".join(f"R = {rounds}" for rounds in ROUNDS[:-1]) + " | one more round keeps |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    state = tokens.numel() * 128 * 2
    for policy in (*POLICIES, "segment:8"):
        config = DeepLoopConfig(
            num_blocks=2, num_rounds=8, d_model=128, num_heads=4, vocab_size=512, context_length=128
        )
        model = DeepLoopModel(config, recompute=policy).bfloat16()
        model(tokens, tokens).loss.backward()
        found = [allocated(lambda m=model, r=r: m(tokens, tokens, num_rounds=r).loss.backward) for r in ROUNDS[:-1]]  # type: ignore[misc]
        cells = [f"{each.kept / state:.1f} / {each.peak / state:.1f}" for each in found]
        growth = (found[-1].kept - found[-2].kept) / (ROUNDS[-2] - ROUNDS[-3]) / state
        print(f"| {policy} | " + " | ".join(cells) + f" | {growth:.2f} |", flush=True)


def precision() -> None:
    """Relative error of a block's gradient to float64: K = 1, width 64, bf16 weights."""
    print("| sum over visits | " + " | ".join(f"R = {rounds}" for rounds in ROUNDS) + " |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    for name in ("autograd, bf16", "float32"):
        errors = [gradient_error(rounds, by_autograd=name != "float32") for rounds in ROUNDS]
        print(f"| {name} | " + " | ".join(f"{error:.4f}" for error in errors) + " |", flush=True)


def gradient_error(rounds: int, *, by_autograd: bool) -> float:
    config = DeepLoopConfig(num_blocks=1, num_rounds=rounds, d_model=64, num_heads=4, vocab_size=500, context_length=64)
    low = DeepLoopModel(config, seed=3).bfloat16()
    exact = copy.deepcopy(low).double()
    batch = torch.randint(0, 500, (4, 65), generator=torch.Generator().manual_seed(0))
    exact(batch[:, :-1], batch[:, 1:]).loss.backward()
    if by_autograd:
        with patch.object(VisitPass, "begin", lambda *args, **options: None):
            low(batch[:, :-1], batch[:, 1:]).loss.backward()
    else:
        low(batch[:, :-1], batch[:, 1:]).loss.backward()
    found, expected = (
        torch.cat([weight.grad.double().flatten() for weight in model.blocks.parameters() if weight.grad is not None])
        for model in (low, exact)
    )
    return float((found - expected).norm() / expected.norm())


def states() -> None:
    """Error of the distance travelled through all rounds, relative to that distance in float64; bf16 weights."""
    cases: list[tuple[int, int, Any]] = [
        (1, 128, "deeploop"),
        (4, 8, "deeploop"),
        (1, 128, "deepnorm"),
        (2, 64, "pre_ln"),
    ]
    print("| K, R, rule | " + " | ".join(f"{k}, {r}, {rule}" for k, r, rule in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for name, kept in KEPT.items():
        print(f"| {name} | " + " | ".join(f"{travel_error(*case, kept):.2g}" for case in cases) + " |", flush=True)


KEPT: dict[str, Callable[[RoundStates, Tensor], Tensor]] = {
    "nothing rounded": lambda _, y: y,
    "change in fp16": lambda states, y: states.advance(y, keep=False),
    "state in fp16": lambda _, y: y.half().float(),
    "state in bf16": lambda _, y: y.bfloat16().float(),
}


@torch.no_grad()
def travel_error(blocks: int, rounds: int, rule: Any, kept: Callable[[RoundStates, Tensor], Tensor]) -> float:
    config = DeepLoopConfig(
        num_blocks=blocks, num_rounds=rounds, d_model=128, num_heads=4, vocab_size=500, context_length=64, residual=rule
    )
    low = DeepLoopModel(config, seed=3).bfloat16()
    exact = copy.deepcopy(low).double()
    tokens = torch.randint(0, 500, (4, 64), generator=torch.Generator().manual_seed(0))
    moved = []
    for model in (exact, low):
        sequence = model.sequence(tokens)
        start = model.enter(tokens, sequence)
        round_states = RoundStates(start, rounded=True)
        x = round_states.start(start) if model is low else start
        for _ in range(rounds):
            y = model.one_round(x, None, None, sequence)
            x = kept(round_states, y) if model is low else y
        moved.append((x - start).double())
    return float((moved[0] - moved[1]).norm() / moved[0].norm())


def step_time() -> None:
    """Forward and backward of GPT-2 small's width by recompute policy, relative to that without recomputation."""
    fields = {"num_blocks": 2, "num_rounds": 4, "context_length": 512, "vocab_size": 8192}
    tokens = torch.randint(0, 8192, (2, 512))
    models = {policy: DeepLoopModel(preset("gpt2-small", **fields), recompute=policy).bfloat16() for policy in POLICIES}
    turns = take_turns([lambda m=m: m(tokens, tokens).loss.backward() for m in models.values()], repetitions=7)  # type: ignore[misc]
    print("| recompute | step time / none |\n|---|---|")
    for policy, seconds in zip(models, turns, strict=True):
        ratios = [one / none for one, none in zip(seconds, turns[0], strict=True)]
        print(f"| {policy} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and gradient precision against the number of rounds.")
    parser.add_argument("question", choices=list(QUESTIONS))
    question = parser.parse_args().question
    print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}")
    QUESTIONS[question]()


QUESTIONS = {"memory": memory, "precision": precision, "states": states, "time": step_time}

if __name__ == "__main__":
    main()
