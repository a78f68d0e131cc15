"""A value whose tokens are spread over ranks: hidden states, or logits before or after the head.

`__torch_function__` looks a function up by its name (`functions.py`). It is put off until numbers are needed, or
computed where tokens lie, some at a time. Any other function gets the whole value, or raises and says what to do.
"""
