"""What BERT reads: one or two texts between special tokens, padded to a fixed length."""

import numpy as np

from train.bert.tokenizer import WordPieceTokenizer

Arrays = dict[str, np.ndarray]


def join(
    tokenizer: WordPieceTokenizer, first: np.ndarray, second: np.ndarray | None, length: int
) -> Arrays:
    """`[CLS] first [SEP]`, or `[CLS] first [SEP] second [SEP]`, of ids that fit.

    Args:
        tokenizer: has the special tokens' ids.
        first: int32 `[tokens]`.
        second: likewise, or None.
        length: S, positions in a sequence.

    Returns:
        `input_ids`, `token_type_ids` (1 from the second text on) and `attention_mask` (0 on
        padding), int32 `[S]`.
    """
    input_ids = np.full(length, tokenizer.pad_id, np.int32)
    token_type_ids, attention_mask = np.zeros((2, length), np.int32)
    used = len(first) + 2
    input_ids[0] = tokenizer.cls_id
    input_ids[1 : used - 1] = first
    input_ids[used - 1] = tokenizer.sep_id
    if second is not None:
        begin, used = used, used + len(second) + 1
        input_ids[begin : used - 1] = second
        input_ids[used - 1] = tokenizer.sep_id
        token_type_ids[begin:used] = 1
    attention_mask[:used] = 1
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
    }


def shorten(
    first: np.ndarray, second: np.ndarray | None, length: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Cuts the ends of texts that `join` could not fit, a token at a time off the longer one."""
    if second is None:
        return first[: length - 2], None
    room = length - 3
    kept = max(room - len(second), (room + 1) // 2)
    first = first[:kept]
    return first, second[: room - len(first)]
