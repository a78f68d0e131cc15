"""GPUs by their data sheets, and what a training step may take on them."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError


@dataclass(frozen=True)
class Capacity:
    """What a training step may take of a GPU and of its host, and what its buffers depend on. Equal on all ranks.

    Args:
        gpu_memory (`int`): Bytes of a GPU.
        host_memory (`int`, defaults to 128 GiB): Bytes of page-locked host memory for a GPU.
        ranks_per_host (`int`, defaults to 8): Neighbouring ranks on one host.
        on_gpu (`bool`, defaults to `True`): Whether kernels of GPUs compute, which sum gradients in fp32, and torch's
            caching allocator leaves gaps.
        ffpa (`bool`, defaults to `False`): Whether ffpa computes heads above 256, else torch's memory-efficient
            attention, which takes more.
    """

    gpu_memory: int
    host_memory: int = 2**37
    ranks_per_host: int = 8
    on_gpu: bool = True
    ffpa: bool = False


class DataSheet(NamedTuple):
    """What a vendor says of a GPU."""

    device: str
    memory: float  # GiB, as torch reports them: less than what the vendor says
    bandwidth: float  # of the memory, bytes/s
    peak: float  # FLOP/s in bf16, summed in fp32, not sparse
    link: float  # bytes/s to the other GPUs of a host, each way
    host: float = 64e9  # bytes/s to the host, each way
    kernel: str = "flash_attn_4"
    widest: str = "torch_efficient"  # the kernel of heads above 256

    @property
    def rates(self) -> str:
        """Where the rates come from with which seconds are predicted."""
        if self == DATA_SHEETS["h200"]:
            return "rates measured on H200s"
        return "rates of its data sheet, at the shares that H200s reached of theirs"


# From NVIDIA's data sheets. Memory is what torch.cuda.mem_get_info told on an H200 and an H100 SXM, else about that.
# PCIe is counted as x16 of its generation; where GPUs have nothing else, hosts copy for them. NVLink bridges, which
# join two or four of a host's cards, are not counted.
DATA_SHEETS = {
    "b200": DataSheet("NVIDIA B200", 178, 8.0e12, 2250e12, 900e9),
    "h200": DataSheet("NVIDIA H200", 139.8, 4.8e12, 989e12, 450e9),
    "h200-nvl": DataSheet("NVIDIA H200 NVL", 139.8, 4.8e12, 835e12, 64e9),
    "h100": DataSheet("NVIDIA H100 SXM", 79.2, 3.35e12, 989e12, 450e9),
    "h100-nvl": DataSheet("NVIDIA H100 NVL", 93.1, 3.9e12, 835e12, 64e9),
    "h100-pcie": DataSheet("NVIDIA H100 PCIe", 79.2, 2.0e12, 756e12, 64e9),
    "a100": DataSheet("NVIDIA A100 SXM 80GB", 79.3, 2.04e12, 312e12, 300e9, 32e9, "flash_attn_2"),
    "a100-40gb": DataSheet("NVIDIA A100 SXM 40GB", 39.4, 1.555e12, 312e12, 300e9, 32e9, "flash_attn_2"),
    "l40s": DataSheet("NVIDIA L40S", 44.4, 0.864e12, 362e12, 32e9, 32e9, "flash_attn_2"),
    "rtx5090": DataSheet("NVIDIA GeForce RTX 5090", 31.4, 1.79e12, 209e12, 64e9, 64e9, "flash_attn_2"),
    "rtx4090": DataSheet("NVIDIA GeForce RTX 4090", 23.5, 1.01e12, 165e12, 32e9, 32e9, "flash_attn_2"),
    "rtx3090": DataSheet("NVIDIA GeForce RTX 3090", 23.5, 0.936e12, 71e12, 32e9, 32e9, "flash_attn_2"),
}
# words in the names of these GPUs that tell none of them from another
_PLAIN = {"nvidia", "geforce", "gpu", "sxm", "sxm4", "sxm5", "sxm6", "80gb", "hbm3", "hbm3e"}


def data_sheet(device: str) -> DataSheet | None:
    """The data sheet of a device, by the name that torch or a user calls it; `None` for variants without one."""
    words = "".join(word for word in re.findall("[a-z0-9]+", device.lower()) if word not in _PLAIN)
    return next((sheet for key, sheet in DATA_SHEETS.items() if key.replace("-", "") == words), None)


def gpu_named(name: str) -> DataSheet:
    """The data sheet that a user names.

    Raises:
        ConfigError: If there is none of this name.
    """
    sheet = data_sheet(name)
    if sheet is None:
        raise ConfigError(f"No data sheet of {name!r} is known: give --machine, one of {', '.join(DATA_SHEETS)}.")
    return sheet


def capacity_of(sheet: DataSheet, ranks_per_host: int = 8) -> Capacity:
    """What a step may take on such GPUs."""
    return Capacity(int(sheet.memory * 2**30), ranks_per_host=ranks_per_host)
