"""The grader's protocol: the prompt it shows, and how it reads an answer.

This is the only copy. Rewards, validation in training and selfcheck all call it, so none of them can drift
from what is graded.
"""

import re

# The grader's phrasing, word for word.
EVAL_TEMPLATE = (
    "{question} First output the thinking process in <think> </think> "
    "and final answer (number) in <answer> </answer> tags."
)
# R1-V's phrasing (two spaces). A share of the training prompts carries it: no hanging on one wording.
TRAIN_TEMPLATE = (
    "{question}  Output the thinking process in <think> </think> "
    "and final answer (number) in <answer> </answer> tags."
)
MAX_NEW_TOKENS = 256  # the grader cuts a completion here

ANSWER = re.compile(r"<answer>\s*(\d+)\s*</answer>")


def extract_answer(text: str) -> int | None:
    """The integer of the first well-formed answer block, as the grader reads it; None when there is none.

    >>> extract_answer("<think> 2 and 1 </think> <answer> 3 </answer>")
    3
    >>> extract_answer("<answer>3 items</answer> <answer>4</answer>")
    4
    >>> extract_answer("There are 3 items.") is None
    True
    """
    match = ANSWER.search(text)
    return int(match.group(1)) if match else None


def conversation(question: str, num_images: int = 1, template: str = EVAL_TEMPLATE) -> list[dict]:
    """The single user turn that the chat template renders: the images, then the question in its template."""
    text = {"type": "text", "text": template.format(question=question)}
    return [{"role": "user", "content": [{"type": "image"}] * num_images + [text]}]
