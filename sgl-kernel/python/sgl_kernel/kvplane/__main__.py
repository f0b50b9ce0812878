"""Compile the data plane as a program, for this machine or another.

    python -m sgl_kernel.kvplane --out kvplane
    python -m sgl_kernel.kvplane --out kvplane --compiler "aarch64-linux-gnu-gcc -mcpu=cortex-a78"

Where it runs, it loads libxxhash.so.0, libzstd.so.1 and libcrypto.so.3.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from sgl_kernel.kvplane import cross_compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the program's file")
    parser.add_argument("--compiler", default="cc -march=native", help="a C compiler's command")
    args = parser.parse_args()
    try:
        cross_compile(shlex.split(args.compiler), args.out)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {getattr(error, 'stderr', None) or error}")


if __name__ == "__main__":
    main()
