"""A small random Llama of transformers and a BPE tokenizer with a ChatML template, saved in a folder."""

from pathlib import Path

LENGTH = 512  # of the model's context
VOCAB_SIZE = 300
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # the tokens 0, 1, 2
TEXT = ["A weft is drawn through the warp of a loom, over and under, row by row."]


def save_chat_folder(folder: Path, seed: int = 3) -> None:
    """The weights are random, drawn with the seed; the tokenizer is the same in each folder."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXT * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
