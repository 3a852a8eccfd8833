import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from leadline.probe.verdict import MATMUL_ERROR_LIMIT
from leadline.train.precision import Precision, exact_fp32_products, matmul_error, precision_context

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def _settings():
    backends = torch.backends
    owners = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    owners += (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    return [owner.fp32_precision for owner in owners]


def test_g19_fp32_product_is_fp32_whatever_was_set_before(any_fp32_setting):
    with precision_context(Precision.FP32, "cpu"):
        assert matmul_error(CPU) < MATMUL_ERROR_LIMIT


@pytest.mark.parametrize("precision", list(Precision))
def test_g19_every_setting_is_full_inside_and_put_back_after(any_fp32_setting, precision):
    before = _settings()
    with precision_context(precision, "cpu"):
        assert set(_settings()) == {"ieee"}
    assert _settings() == before


def test_g19_settings_inside_can_be_read_in_the_old_way(any_fp32_setting):
    with exact_fp32_products():
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cudnn.allow_tf32 is False


def test_g19_settings_are_put_back_after_an_error(any_fp32_setting):
    before = _settings()
    with pytest.raises(ZeroDivisionError), precision_context(Precision.FP32, "cpu"):
        raise ZeroDivisionError
    assert _settings() == before


def test_g19_older_setting_is_put_back_in_its_own_words():
    torch.set_float32_matmul_precision("medium")
    try:
        with precision_context(Precision.FP32, "cpu"):
            pass
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_g19_product_in_ten_bits_is_above_the_limit(monkeypatch):
    matmul = torch.Tensor.__matmul__

    def in_tf32(left, right):
        if left.dtype is not torch.float32:
            return matmul(left, right)
        cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (left, right)]
        return matmul(*cut)

    monkeypatch.setattr(torch.Tensor, "__matmul__", in_tf32)
    assert matmul_error(CPU) > 10 * MATMUL_ERROR_LIMIT


@pytest.mark.parametrize(
    ("precision", "dtype"), [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)]
)
def test_products_of_a_lane_come_in_its_precision(precision, dtype):
    with precision_context(precision, "cpu"):
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


def test_fp32_lane_inside_an_autocast_is_still_fp32():
    with torch.autocast("cpu", dtype=torch.bfloat16), precision_context(Precision.FP32, "cpu"):
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


ON_THE_CARD = """
import torch
from leadline.train.precision import Precision, matmul_error, precision_context
with precision_context(Precision.FP32, "cuda"):
    print(matmul_error(torch.device("cuda")))
"""


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("override", "seen"), [("1", True), (None, False)])
def test_g19_tf32_forced_by_the_driver_is_seen(override, seen):
    environment = {key: value for key, value in os.environ.items() if "TF32" not in key}
    if override:
        environment["NVIDIA_TF32_OVERRIDE"] = override
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_CARD],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (float(done.stdout) > MATMUL_ERROR_LIMIT) is seen
