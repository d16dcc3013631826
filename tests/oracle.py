"""What the tests compare with: compressed-tensors' decompressor, transformers in float32, gguf's own reader."""

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.utils.match import match_name
from gguf import GGUFReader
from gguf.quants import dequantize as gguf_dequantize
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import make_checkpoint

SHARED = Path(__file__).parents[2] / "shared" / "checkpoints"
LENGTHS = (1, 2, 3, 8, 17, 33, 64, 100, 200)
PROMPTS = [[(i * 977 + 131 + 57 * n) % 3900 for i in range(n)] for n in LENGTHS]


MADE = {"made-nvfp4": "nvfp4", "made-int4-mixed": "int4-mixed", "made-fp8": "fp8", "made-bf16": "bf16"}


@cache
def checkpoint(name: str) -> Path:
    """A small checkpoint of the true architecture.

    `made-*` are written by tools/make_checkpoint.py and always there; the others were written by the real tools and lie
    beside the repository here and in CI: without them a test that names one is skipped, and says so.
    """
    if name in MADE:
        folder = Path(tempfile.mkdtemp(prefix="mcpq-test-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make_checkpoint.make_checkpoint(folder / name, make_checkpoint.PRESETS["demo"], MADE[name], seed=3)
        return folder / name
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not there; the made-* checkpoints stand in for it")
    return SHARED / name


class Decompressed:
    """A checkpoint's weights as compressed-tensors' own functions give them."""

    def __init__(self, path: Path) -> None:
        self.files = [safe_open(f, "pt") for f in sorted(path.glob("*.safetensors"))]
        self.where = {k: f for f in self.files for k in f.keys()}  # noqa: SIM118
        q = json.loads((path / "config.json").read_text()).get("quantization_config")
        self.config = QuantizationConfig.model_validate(q) if q else None

    def raw(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        return self.where[name].get_tensor(name)

    @cached_property
    def modules(self) -> set[str]:
        """Names of all modules with a weight, quantized or not."""
        suffixes = (".weight", ".weight_packed")
        return {k[:-len(s)] for k in self.where for s in suffixes if k.endswith(s)}

    def scheme(self, module: str) -> Any:
        """compressed-tensors' scheme of a module, None when it is stored plain."""
        if self.config is None or module + ".weight_scale" not in self.where:
            return None
        for scheme in self.config.config_groups.values():
            if any(match_name(module, t) or t == "Linear" for t in scheme.targets):
                return scheme
        raise AssertionError(module)

    def parts(self, module: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Codes, scale, zero point and global scale, as float32."""
        scheme, scale = self.scheme(module), self.raw(module + ".weight_scale")
        kind = scheme.format or self.config.format  # type: ignore[union-attr]
        kind = getattr(kind, "value", kind)
        zero = divisor = None
        if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            packed = self.raw(module + ".weight_packed")
            codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
            if kind[0] == "n":
                divisor = self.raw(module + ".weight_global_scale").float()
            else:
                scale = decompress_mx_scale(scale)
        elif kind == "pack-quantized":
            shape, bits = self.raw(module + ".weight_shape"), scheme.weights.num_bits
            codes = unpack_from_int32(self.raw(module + ".weight_packed"), bits, torch.Size(shape.tolist()))
            if not scheme.weights.symmetric:
                zero = unpack_from_int32(self.raw(module + ".weight_zero_point"), bits,
                                         torch.Size([int(shape[0]), scale.shape[-1]]), packed_dim=0).float()
        else:
            codes = self.raw(module + ".weight")
        return codes.float(), scale.float(), zero, divisor

    def weight(self, module: str) -> torch.Tensor:
        """float32 weight."""
        scheme = self.scheme(module)
        if scheme is None:
            return self.raw(module + ".weight").float()
        codes, scale, zero, divisor = self.parts(module)
        return dequantize(x_q=codes, scale=scale, zero_point=zero, args=scheme.weights, dtype=torch.float32,
                          global_scale=divisor)

    def bf16(self, module: str) -> torch.Tensor:
        """The weight as compressed-tensors' own compressor classes decompress it, rounded to BF16 as it is stored."""
        scheme = self.scheme(module)
        kind = scheme.format or self.config.format  # type: ignore[union-attr]
        compressor = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
        state = {k.rsplit(".", 1)[1]: self.raw(k) for k in self.where if k.rsplit(".", 1)[0] == module}
        return compressor.decompress(state, scheme)["weight"].bfloat16()

    def codes_times_scales(self, module: str) -> tuple[np.ndarray, float]:
        """float32 code x block scale of an FP4 weight, which is exact, and the global scale that divides."""
        codes, scale, _, divisor = self.parts(module)
        return (codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)).numpy(), \
            1.0 if divisor is None else float(divisor)


def float32_model(path: Path) -> Any:
    """The transformers model in float32 with the decompressed weights; experts fused by hand."""
    from transformers import AutoConfig, MiniCPMV4_7ForConditionalGeneration
    source = Decompressed(path)
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = config.text_config.dtype = config.vision_config.dtype = torch.float32
    model = MiniCPMV4_7ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            base, leaf = name.rsplit(".", 1)
            if leaf == "gate_up_proj":
                for e in range(parameter.shape[0]):
                    halves = [source.weight(f"{base}.{e}.{x}_proj") for x in ("gate", "up")]
                    parameter[e].copy_(torch.cat(halves))
            elif base.endswith("experts") and leaf == "down_proj":
                for e in range(parameter.shape[0]):
                    parameter[e].copy_(source.weight(f"{base}.{e}.down_proj"))
            elif base == "lm_head" and config.tie_word_embeddings:
                parameter.copy_(source.weight("model.language_model.embed_tokens"))
            elif leaf == "weight" and base in source.modules:
                parameter.copy_(source.weight(base))
            else:
                parameter.copy_(source.raw(name).float())
    return model


def hf_logprobs(model: Any, ids: Sequence[int]) -> np.ndarray:
    """float64 log-probabilities of the token after `ids`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1]
    return torch.log_softmax(logits.double(), -1).numpy()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL divergence of log-probabilities q from p, in nats."""
    return float(np.sum(np.exp(p) * (p - q)))


def read_gguf(path: Path) -> dict[str, tuple[np.ndarray, str, np.ndarray]]:
    """name -> (float32 values, outermost dimension first; type name; raw bytes) by gguf's reader and dequantizer."""
    out = {}
    for t in GGUFReader(path).tensors:
        values = gguf_dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        out[t.name] = (values, t.tensor_type.name, np.ascontiguousarray(t.data).view(np.uint8))
    return out
