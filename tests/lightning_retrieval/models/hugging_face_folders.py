"""Folders of small models of Hugging Face, as `save_pretrained` writes them."""

import json

import torch

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
CONFIGS = {
    "dinov2": SMALL,
    "vit": SMALL,
    "deit": SMALL,
    "dinov2_with_registers": SMALL,
    "clip_vision_model": SMALL,
    "siglip_vision_model": SMALL,
    "swin": SWIN,
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}
PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 48},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.25, 0.3],
}


def write_folder(folder, kind="dinov2", processor=PROCESSOR):
    """Write the folder of a small model with random weights; the model, in eval mode."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind]))
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()
