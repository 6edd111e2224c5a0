import numpy as np
import pytest
import torch

from lightning_retrieval.ranking.labels import Role, has_role


def test_values_that_data_sets_and_users_store():
    assert (int(Role.JUNK), int(Role.QUERY), int(Role.GALLERY), int(Role.BOTH)) == (0, 1, 2, 3)
    assert Role.QUERY | Role.GALLERY == Role.BOTH
    assert np.array([Role.BOTH, Role.JUNK], dtype=np.uint8).tolist() == [3, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_has_role(dtype):
    roles = torch.arange(4).to(dtype)
    assert has_role(roles, Role.QUERY).tolist() == [False, True, False, True]
    assert has_role(roles, Role.GALLERY).tolist() == [False, False, True, True]
    assert has_role(roles, Role.BOTH).tolist() == [False, True, True, True]
