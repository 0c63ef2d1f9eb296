"""Module classes of torch and of libraries come back as torch's own save and load bring them."""

from __future__ import annotations

import pytest

from tests.checkpoint.torch.state.modulecorpus import Found, campaign, run, table, torch_nn

FEW = {
    "torch.ao.nn.quantized.modules.Quantize",
    "torch.ao.quantization.fake_quantize.FakeQuantize",
    "torch.ao.quantization.observer.HistogramObserver",
    "torch.nn.modules.activation.MultiheadAttention",
    "torch.nn.modules.batchnorm.LazyBatchNorm1d (run)",
    "torch.nn.modules.batchnorm.SyncBatchNorm",
    "torch.nn.modules.rnn.LSTM",
    "nn.utils.spectral_norm",
    "parametrizations.orthogonal",
    "prepare_qat (run)",
}
QUANTIZED = "quantize_dynamic"


@pytest.mark.filterwarnings("ignore")
def test_some_classes_of_torch() -> None:
    """Those whose state_dict is more than parameters and buffers, and a few others."""
    found = run(((n, make) for n, make in torch_nn() if n in FEW | {QUANTIZED}), Found())
    assert set(found.exact) == FEW, table({"torch.nn": found})
    assert set(found.refused) == {QUANTIZED}
    assert found.spoke == 3


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
def test_all_classes_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    results = campaign()
    with capsys.disabled():
        print(f"\n{table(results)}")
    assert not {n: f.wrong for n, f in results.items() if isinstance(f, Found) and f.wrong}
