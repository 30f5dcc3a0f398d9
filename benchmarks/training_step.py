"""Step time of a DeepLoop model against a plain GPT of the same unrolled depth, on a CPU or a GPU.

    python -m benchmarks.training_step --blocks 2 --rounds 1 8 --sequences 4 --context 512            # a CPU
    python -m benchmarks.training_step --preset gpt2-small gpt2-medium --rounds 1 2 4 --sequences 8 --compile    # a GPU

A step is forward, backward and AdamW in bf16. Both models and a matrix product of the same width take turns within
each repetition, so that a busy machine slows all of them; the median of the repetitions counts. MFU is the model's own
FLOPs (rounds as they run, recomputation left out) and HFU those that are computed (recomputation as well), against the
rate of the matrix product in the same run.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.plain_gpt import PlainGPT
from deeploop_model import DeepLoopModel, preset
from deeploop_model.compilation import compiled_block, missing_compiler
from deeploop_model.flops import recompute_flops, train_flops

Step = Callable[[], object]
PRODUCTS = 20
"""Matrix products timed together: one of a GPU takes no longer than its launch."""


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor() or platform.machine()}"
    if args.compile and (missing := missing_compiler(device)):
        raise SystemExit(f"error: --compile: {missing}")
    print(
        f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{args.sequences} x {args.context} tokens, recompute {args.recompute}" + (", compiled" if args.compile else "")
    )
    print(
        "| preset | K | R | plain ms | DeepLoop ms | plain/DeepLoop | tokens/s | GEMM TFLOP/s | MFU | HFU | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in args.preset:
        for rounds in args.rounds:
            print(row(args, name, rounds, device), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time against a plain GPT, and FLOPs utilisation.")
    parser.add_argument("--preset", nargs="+", default=["gpt2-small"])
    parser.add_argument("--blocks", type=int, help="K; the preset's by default")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--compile", action="store_true", help="compile DeepLoop's block, and the plain model's blocks")
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def row(args: argparse.Namespace, name: str, rounds: int, device: torch.device) -> str:
    fields = {
        "num_rounds": rounds,
        "context_length": args.context,
        "vocab_size": args.vocab_size,
        "position": "learned",
    }
    config = preset(name, **fields, **({"num_blocks": args.blocks} if args.blocks else {}))
    # Of an earlier row: weights that visits refer to wait for the collector, compiled code for the reset.
    gc.collect()
    torch.compiler.reset()
    tokens = torch.randint(0, args.vocab_size, (args.sequences, args.context), device=device)
    ours = DeepLoopModel(config, recompute=args.recompute).to(device, torch.bfloat16)
    if args.compile:
        ours.block_step = compiled_block()
    our_step = training_step(ours, lambda: ours(tokens, tokens).loss)
    peak = measured_peak(our_step, device)  # while the other model isn't there
    plain = PlainGPT(config.unrolled_depth, config.d_model, config.num_heads, config.padded_vocab_size, args.context)
    plain.to(device, torch.bfloat16)
    if args.compile:
        for block in plain.blocks:
            block.compile()
    x = torch.randn(tokens.numel(), config.d_model, device=device).bfloat16()
    w = torch.randn(config.d_model, 4 * config.d_model, device=device).bfloat16()
    steps = [
        training_step(plain, lambda: plain(tokens, tokens)),
        our_step,
        lambda: [torch.mm(x, w) for _ in range(PRODUCTS)],
    ]
    plain_s, ours_s, gemm_s = interleaved(steps, args.repetitions, device)
    gemm = PRODUCTS * 2 * x.numel() * w.shape[1] / gemm_s
    model_flops = train_flops(config)
    mfu, hfu = (
        flops * tokens.numel() / ours_s / gemm
        for flops in (model_flops, model_flops + recompute_flops(config, args.recompute))
    )
    return (
        f"| {name} | {config.num_blocks} | {rounds} | {1e3 * plain_s:.0f} | {1e3 * ours_s:.0f} "
        f"| {plain_s / ours_s:.3f} | {tokens.numel() / ours_s:,.0f} | {gemm / 1e12:.2f} | {mfu:.1%} | {hfu:.1%} "
        f"| {peak} |"
    )


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleaved(steps: list[Step], repetitions: int, device: torch.device) -> list[float]:
    """Median seconds of each; they take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for repetition in range(repetitions + 1):
        for step, seconds in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition:  # the first one warms up
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def measured_peak(step: Step, device: torch.device) -> str:
    if device.type != "cuda":
        return "-"
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f}"


if __name__ == "__main__":
    main()
