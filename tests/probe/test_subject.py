"""A workload is held against what will be asked of it before anything is spent."""

from dataclasses import replace

import pytest

from leadline.core.errors import UsageError
from leadline.probe.request import EnvironmentRequest
from leadline.probe.subject import check_workload

CPU = EnvironmentRequest(device="cpu", requirements=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_lens": (512, 4096)}, "seq_len of 4096.*max_seq_len is 1024"),
        ({"vocab_size": 4096}, "vocabulary is 4096.*rows for 2048"),
        ({"workload": {"kind": "dual-mind", "preset": "vast"}}, "preset 'vast' is unknown"),
    ],
)
def test_workload_that_cannot_do_what_will_be_asked_is_refused_first(change, words):
    request = replace(CPU, workload={"kind": "dual-mind", "preset": "tiny"})
    check_workload(request)
    with pytest.raises(UsageError, match=words):
        check_workload(replace(request, **change))
