"""hf_burst's attention beside that of other packages and the limit without communication, interleaved in one run.

The whole matrix on 4 GPUs, then the same with the kernels of FlashAttention-2 for all that let one choose:

    torchrun --nproc-per-node 4 recipes/benchmarks/attention.py --kv-heads 8 32 \\
        --lengths 8192 16384 32768 65536 131072 262144 524288 --out outputs/attention_4xH200.json

    torchrun --nproc-per-node 4 recipes/benchmarks/attention.py --kv-heads 8 32 --kernel flash_attn_2 \\
        --contenders limit 'hf_burst*' 'ulysses*' 'ring*' --out outputs/attention_4xH200_fa2.json

On two CPU processes, to see that it works (most peers need GPUs):

    torchrun --nproc-per-node 2 recipes/benchmarks/attention.py --device cpu --dtype float32 --q-heads 4 \\
        --kv-heads 2 4 --head-dim 16 --lengths 256 512 --check-length 64 --out outputs/attention_cpu.json

README.md beside this file says what is measured and how to read the result; plot.py draws it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.cli.bench import add_attention_arguments, benchmark
from recipes.benchmarks.peers import peers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_attention_arguments(parser)
    return benchmark(parser.parse_args(), peers())


if __name__ == "__main__":
    sys.exit(main())
