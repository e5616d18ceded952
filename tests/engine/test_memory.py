"""What divide() makes of the memory: the published sizes, refusals that say what would fit, drafters and all."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leyden.bench.middling import CONFIG, RELEASE
from leyden.cache.pool import NO_DRAFTER, DraftShape, Pool
from leyden.config.engine import EngineConfig
from leyden.config.launch import Launch
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split, check_host_room, divide
from leyden.errors import ConfigError
from leyden.ops.cpu.program import types
from leyden.testing import checkpoints
from leyden.types import Request, SamplingParams
from tests.engine.conftest import TINY

GIB = 2**30
NANO = ModelConfig.from_dict(CONFIG | RELEASE | {"max_position_embeddings": 1048576})


def split(gib: float, device: str = "cuda", **config) -> Split:
    return divide(EngineConfig(model="m", **config), NANO, torch.bfloat16, device, int(gib * GIB))


def bytes_of(made: Split) -> int:
    return made.shape.slots * made.slot_bytes + made.shape.pages * made.page_bytes


def test_the_published_sizes():
    made = split(20, max_num_seqs=8)
    assert made.page_bytes == 16 * 6144 and made.slot_bytes == 49_082_368
    assert split(20, max_num_seqs=8, mamba_ssm_cache_dtype="float16").slot_bytes == 24_965_120


CACHES_FP8 = [
    {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    {"producer": {}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},  # hf_quant_config.json
    {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
]


@pytest.mark.parametrize("quantization", CACHES_FP8)
def test_auto_is_an_fp8_cache_where_the_checkpoint_says_so(quantization, caplog):
    model = replace(NANO, quantization=quantization)

    def kv_dtype(device: str, model: ModelConfig = model, **config: str) -> torch.dtype:
        return divide(EngineConfig(model="m", **config), model, torch.bfloat16, device, 20 * GIB).shape.kv_dtype

    with caplog.at_level("INFO", "leyden"):
        assert kv_dtype("cuda") == torch.float8_e4m3fn
    assert "cached in FP8, as the checkpoint says" in caplog.text
    assert kv_dtype("cuda", kv_cache_dtype="bfloat16") == kv_dtype("cpu") == torch.bfloat16
    assert kv_dtype("cuda", replace(NANO, quantization={"quant_algo": "NVFP4"})) == torch.bfloat16
    assert kv_dtype("cuda", NANO) == torch.bfloat16


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_fp8_cache_halves_the_pages(name, device):
    wide, made = (split(20, device, max_num_seqs=8, kv_cache_dtype=dtype) for dtype in ("auto", name))
    assert made.shape.kv_dtype == torch.float8_e4m3fn and made.shape.conv_dtype == torch.bfloat16
    assert made.page_bytes == 16 * 3072 and made.slot_bytes == wide.slot_bytes
    assert made.cache_tokens == pytest.approx(2 * wide.cache_tokens, rel=1e-3)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e5m2 is not available here; accepted are auto"):
        split(20, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="--mamba-ssm-cache-dtype fp8"):
        split(20, mamba_ssm_cache_dtype="fp8")


@pytest.mark.parametrize("gib", [2, 7, 18, 100])
@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 4}, {"enable_prefix_caching": False}, {"max_model_len": 8192}])
def test_the_parts_are_as_large_as_the_whole_and_not_larger(gib, config):
    made = split(gib, **config)
    assert bytes_of(made) <= gib * GIB
    assert made.cache_tokens >= made.shape.max_model_len
    used_up = bytes_of(made) > 0.95 * gib * GIB
    enough = made.cache_tokens >= (made.shape.slots - 1) * made.shape.max_model_len
    assert used_up or enough
    cached = made.shape.slots - 1 - made.seqs
    assert (cached > 0) == (config.get("enable_prefix_caching") is not False)


def test_one_million_tokens_fit_where_they_should():
    assert split(14, max_num_seqs=8).shape.max_model_len == 1_048_576
    # 256K in BF16 beside the weights on one H100: about eleven at once
    made = split(18, max_num_seqs=11, max_model_len=262_144, enable_prefix_caching=False)
    assert made.cache_tokens // 262_144 == 11


def test_auto_takes_what_fits(caplog):
    launch = Launch.from_argv(["m", "--max-model-len", "auto"])
    assert launch.engine.max_model_len is None
    made = split(3, max_num_seqs=8)
    assert 16 <= made.shape.max_model_len < 1_048_576
    assert made.cache_tokens >= made.shape.max_model_len


def test_what_cannot_fit_is_refused_with_numbers_that_would():
    with pytest.raises(ConfigError) as refused:
        split(6, max_num_seqs=64, max_model_len=1_048_576)
    message = str(refused.value)
    assert "6.00 GiB are free" in message and "one context of that length 6.00 GiB" in message
    length, seqs = map(
        int, re.search(r"what would fit: --max-model-len (\d+) with --max-num-seqs (\d+)", message).groups()
    )
    assert split(6, max_num_seqs=seqs, max_model_len=length).shape.max_model_len == length
    with pytest.raises(ConfigError):
        split(6, max_num_seqs=seqs, max_model_len=length + 64)
    with pytest.raises(ConfigError) as refused:
        split(7, max_num_seqs=64, max_model_len=1_048_576)
    length, seqs = map(
        int, re.search(r", or --max-model-len (\d+) with --max-num-seqs (\d+)", str(refused.value)).groups()
    )
    assert length == 1_048_576 and split(7, max_num_seqs=seqs, max_model_len=length).seqs == seqs
    with pytest.raises(ConfigError):
        split(7, max_num_seqs=seqs + 1, max_model_len=length)
    with pytest.raises(ConfigError, match="0.01 GiB are free .*; give it more memory"):
        split(0.01, max_num_seqs=1, max_model_len=16)


def test_host_memory_is_divided_as_the_device():
    made = split(20, max_num_seqs=8, kv_offloading_size=50)
    assert made.host_slots * made.slot_bytes + made.host_pages * made.page_bytes <= 50 * GIB
    near = (made.shape.slots - 1 - made.seqs) * made.slot_bytes / ((made.shape.pages - 1) * made.page_bytes)
    far = made.host_slots * made.slot_bytes / (made.host_pages * made.page_bytes)
    assert far == pytest.approx(near, rel=0.02)
    assert "in 50.00 GiB of host memory" in str(made)
    assert split(20, kv_offloading_size=50, enable_prefix_caching=False).host_slots == 0
    assert split(20).host_slots == 0 and "host memory" not in str(split(20))
    with pytest.raises(ConfigError, match="--kv-offloading-size 0.01 has no room for one state"):
        split(20, kv_offloading_size=0.01)


MIB = 2**20
DRAFTS = {
    "none": NO_DRAFTER,
    "mtp": DraftShape(width=3, lookahead=2, mtp_layers=1),
    "dspark": DraftShape(width=7, layers=(2, 1, 32)),
}


@pytest.mark.parametrize(("device", "where"), [("cpu", "TMPDIR"), ("cuda", "main memory")])
def test_more_host_memory_than_there_is_is_refused(device, where):
    check_host_room(EngineConfig(model="m", kv_offloading_size=0.001), torch.device(device))
    with pytest.raises(ConfigError, match=f"--kv-offloading-size: 1e\\+06 GiB are asked for, .*{where}"):
        check_host_room(EngineConfig(model="m", kv_offloading_size=1e6), torch.device(device))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("given", [{}, {"max_model_len": 1000}, {"max_num_seqs": 3, "enable_prefix_caching": False}])
def test_the_parts_are_the_whole(draft, given):
    config = EngineConfig(model="", **given)
    split = divide(config, TINY, torch.bfloat16, "cpu", 8 * MIB, DRAFTS[draft])
    pool = Pool(TINY, split.shape, "meta")
    parts = (pool.kv, pool.draft, pool.conv, pool.ssm, pool.ring)
    total = sum(part.nbytes for part in parts)
    assert total == split.shape.slots * split.slot_bytes + split.shape.pages * split.page_bytes
    assert total <= 8 * MIB
    # the longest sequence and what a drafter writes behind its end have pages, and places in the page table
    lookahead = DRAFTS[draft].lookahead
    assert split.cache_tokens >= split.shape.max_model_len + lookahead
    assert split.shape.pages_per_slot * split.shape.page >= split.shape.max_model_len + lookahead


def test_a_drafter_takes_room():
    config = EngineConfig(model="", max_num_seqs=4)
    plain, drafted = (divide(config, TINY, torch.float32, "cpu", 2 * MIB, DRAFTS[name]) for name in ("none", "dspark"))
    assert drafted.slot_bytes > plain.slot_bytes and drafted.page_bytes > plain.page_bytes
    assert drafted.cache_tokens < plain.cache_tokens
    with pytest.raises(ConfigError, match="does not fit"):
        divide(
            EngineConfig(model="", max_num_seqs=64, max_model_len=4096), TINY, torch.float32, "cpu", MIB, DRAFTS["mtp"]
        )


def test_states_are_rounded_at_random_where_they_are_fp16_and_that_is_asked_for():
    fp16, asked = {"mamba_ssm_cache_dtype": "float16"}, {"enable_mamba_cache_stochastic_rounding": True}
    five = {"mamba_cache_philox_rounds": 5}
    for settings, wanted in (({}, 0), (fp16 | five, 0), (asked | fp16, 10), (asked | fp16 | five, 5)):
        config = EngineConfig(model="m", max_num_seqs=2, **settings)
        assert divide(config, TINY, torch.float32, "cpu", 4 * MIB).shape.rounds == wanted
    with pytest.raises(ConfigError, match="needs --mamba-ssm-cache-dtype float16"):
        EngineConfig(model="m", **asked)
    with pytest.raises(ConfigError, match="philox-rounds must not be negative, got -1"):
        EngineConfig(model="m", mamba_cache_philox_rounds=-1)


def test_tokens_that_wait_take_room_on_cuda():
    lazy = EngineConfig(model="m", max_num_seqs=2, use_replayssm=True)
    assert divide(lazy, TINY, torch.float32, "cpu", 4 * MIB).shape.period == 1
    plain, more = (
        divide(config, TINY, torch.bfloat16, "cuda", 8 * MIB) for config in (replace(lazy, use_replayssm=False), lazy)
    )
    pool = Pool(TINY, more.shape, "meta")
    assert (plain.shape.period, more.shape.period) == (1, 16)
    assert more.slot_bytes - plain.slot_bytes == pool.recent[:, 0].nbytes == 4 * 15 * (64 + 2 * 16 + 4) * 2
    parts = (pool.kv, pool.conv, pool.ssm, pool.recent)
    assert sum(part.nbytes for part in parts) == more.shape.slots * more.slot_bytes + more.shape.pages * more.page_bytes
    with pytest.raises(ConfigError, match=r"--replayssm-buffer-len must be in 1\.\.32, got 33"):
        EngineConfig(model="m", replayssm_buffer_len=33)
    with pytest.raises(ConfigError, match="--use-replayssm has kernels of its own, which --mamba-backend flashinfer"):
        replace(lazy, mamba_backend="flashinfer")


@pytest.mark.parametrize("drafts", [0, 2])
def test_an_engine_rounds_its_states_at_random(tmp_path: Path, drafts: int):
    checkpoints.tiny(tmp_path, "mtp", tokenizer=False)
    sizes = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1, "kv_cache_memory_bytes": 2**24}
    more = {"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_cache_dtype": "float16"}
    spec = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else {}
    texts = []
    for _ in range(2):
        made = Engine.load(EngineConfig(model=str(tmp_path), speculative_config=spec, **sizes, **more))
        made.submit(Request(id="a", prompt=[3, 4, 5], params=SamplingParams(temperature=0, max_tokens=20)))
        texts.append([token for _ in range(40) if made.busy for delta in made.step() for token in delta.token_ids])
        assert made.runner.pool.shape.rounds == 10 and made.runner.pool.ssm.dtype == torch.float16
        assert not made.stats().failed_drafts and (made.runner.recorded_steps > 1 or torch.float16 not in types)
    assert texts[0] == texts[1] and len(texts[0]) == 20
