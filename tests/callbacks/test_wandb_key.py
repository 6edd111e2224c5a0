"""A run is offline unless Weights & Biases would find a key."""

from lightning_retrieval.callbacks import RetrievalWandbLogger


def test_logger_is_online_with_a_key_unless_offline_is_given(tmp_path, no_key, monkeypatch):
    def is_offline(**settings):
        return RetrievalWandbLogger(save_dir=tmp_path, **settings).offline

    assert is_offline()
    assert is_offline(offline=True)
    assert not is_offline(offline=False)
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine example.org login user password secret\n")
    assert is_offline()
    netrc.write_text("machine api.wandb.ai login user password " + 40 * "0" + "\n")
    assert not is_offline()
    assert is_offline(offline=True)
    netrc.write_text("half a line")
    assert is_offline()
    netrc.unlink()
    with monkeypatch.context() as there:
        there.setenv("WANDB_API_KEY", 40 * "0")
        assert not is_offline()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert not is_offline()


def test_keys_are_found_where_weights_and_biases_finds_them(tmp_path, no_key, monkeypatch):
    def is_offline():
        return RetrievalWandbLogger(save_dir=tmp_path).offline

    netrc = tmp_path / "home" / ".netrc"
    monkeypatch.setenv("WANDB_API_KEY", "  ")
    monkeypatch.setenv("WANDB_MODE", "")
    assert is_offline()
    netrc.write_bytes(b"machine api.wandb.ai login m\xfcller password x\n")  # not UTF-8
    assert is_offline()
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert not is_offline()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # for which there is none
    assert is_offline()
    netrc.write_text("machine wandb.example.org login user password x\n")
    assert not is_offline()
    monkeypatch.setenv("NETRC", str(tmp_path / "elsewhere"))
    assert is_offline()
