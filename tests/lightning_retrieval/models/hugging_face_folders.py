"""Folders of small models of images and of texts of Hugging Face, as `save_pretrained` writes them."""

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


SMALL_TEXTS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
TEXT_MODELS = {
    "bert": SMALL_TEXTS,
    "roberta": {**SMALL_TEXTS, "max_position_embeddings": 13, "pad_token_id": 3, **SPECIAL},
    "clip_text_model": {**SMALL_TEXTS, **SPECIAL, "eos_token_id": 39},
}
IMAGES = {**SMALL_TEXTS, "image_size": 8, "patch_size": 4}
TEXT_MODELS["clip"] = {"text_config": TEXT_MODELS["clip_text_model"], "vision_config": IMAGES}
TEXT_MODELS["siglip"] = {"text_config": {**SMALL_TEXTS, **SPECIAL}, "vision_config": IMAGES}


def write_folder(folder, kind="dinov2", processor=PROCESSOR):
    """Write the folder of a small model with random weights; the model, in eval mode."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind]))
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()


def write_text_folder(folder, kind):
    """Write the folder of a small text model with random weights and a word tokenizer; the model, in eval mode."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TEXT_MODELS[kind])
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "red", "shoes", "a", "sofa", "of", "green", "velvet", ",", "long"]
    vocabulary = {word: number for number, word in enumerate(words)}
    vocabulary["[END]"] = 39
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [END]", special_tokens=[("[CLS]", 1), ("[END]", 39)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=9)
    fast.save_pretrained(folder)
    return model.eval(), fast
