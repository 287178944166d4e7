"""The demo: plan, verify and train the photographs example with the commands a user would type.

At the end the trained weights go back into the plain model, which captions some photographs.

    python -m examples.demo [--steps N]

Ends with a summary, and with exit code 1 unless the gradients agreed and the loss has clearly
fallen. Everything it writes goes to ``out/demo``.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from examples import photographs
from mllm_compile import load_weights

REQUEST = "examples/photographs.toml"
OUT = Path("out/demo")
CHECKPOINT = OUT / "checkpoint"
STEPS = 100
SHOWN = ("chelsea.png", "coffee.png", "rocket.jpg")
CLEARLY_FALLEN = 0.5  # of the first loss


def main() -> int:
    """Run the three commands and sum up."""
    parser = argparse.ArgumentParser(description="Plan, verify and train on photographs.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps ({STEPS})")
    steps = parser.parse_args().steps
    shutil.rmtree(OUT, ignore_errors=True)
    start = time.monotonic()
    command("plan", REQUEST, "-o", str(OUT / "plan.json"))
    report = OUT / "verify.json"
    command("verify", REQUEST, "--set", "dtype=float64", "--json", str(report))
    log = OUT / "run.jsonl"
    command(
        "run", REQUEST, "--steps", str(steps), "--log", str(log), "--checkpoint", str(CHECKPOINT)
    )
    print("\nthe trained weights, back in the plain model, say:")
    trained = photographs.model()
    load_weights(trained, CHECKPOINT)
    for name in SHOWN:
        print(f"  {name:12} {photographs.caption(trained, name)}")
    return summary(
        json.loads(report.read_text()),
        [json.loads(line) for line in log.read_text().splitlines()],
        time.monotonic() - start,
    )


def command(*arguments: str) -> None:
    """Run one command of the compiler, shown as a user would type it; end with it if it fails."""
    print(f"\n$ mllm-compile {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "mllm_compile", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def summary(report: dict, steps: list[dict], seconds: float) -> int:
    """Say what was verified and learned."""
    gradients, loss = report["gradients"], report["loss"]
    first, last = steps[0]["loss"], steps[-1]["loss"]
    speed = sorted(step["tokens_per_second"] for step in steps)[len(steps) // 2]
    fallen = last < CLEARLY_FALLEN * first
    print(
        "\nsummary"
        f"\n  verified  loss and {gradients['compared']} gradients against the plain model in "
        f"float64:\n            relative errors {loss['relative_error']:.1e} and at most "
        f"{gradients['max_relative_error']:.1e}"
        f"\n  trained   {len(steps)} steps on three ranks, {speed:.0f} tokens/s"
        f"\n  loss      {first:.3f} -> {last:.3f}"
        f"{'' if fallen else '  (has not clearly fallen: too few steps?)'}"
        f"\n  took      {seconds:.0f} s; plan, report, log and checkpoint are in {OUT}"
    )
    return 0 if fallen and report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
