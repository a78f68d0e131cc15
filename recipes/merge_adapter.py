"""Merges an adapter into its base and writes a full model, which loads without peft and hf_burst.

    python recipes/merge_adapter.py outputs/sft outputs/merged --dtype bfloat16

The folder of the adapter may be a checkpoint of a training. RoPE settings that are saved beside the adapter are kept.
"""

from pathlib import Path

import beginning
from settings import mapping, probe_merged, using

from hf_burst.cli import Parser


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("to", type=Path, help="folder to write the full model to")
    parser.add_argument("--dtype", default="auto", help="dtype to merge in; by default that of the base's files")
    arguments = parser.parse_args()
    if not (file := arguments.adapter / "adapter_config.json").exists():
        raise SystemExit(f"{arguments.adapter} holds no adapter_config.json; give the folder of an adapter.")
    base = mapping("adapter", file).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise SystemExit(f"{file} names no base_model_name_or_path, but {base!r}; set it to the name or folder of one.")
    probe_merged("to", str(arguments.to), str(arguments.adapter), base)
    beginning.loading()
    from models import merge_adapter

    with using(f"adapter {arguments.adapter}", TypeError):  # of peft, for values of other types
        merge_adapter(str(arguments.adapter), arguments.to, arguments.dtype)
    print(f"the full model is in {arguments.to}")


if __name__ == "__main__":
    main()
