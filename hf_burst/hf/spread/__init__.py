"""A value whose tokens are spread over ranks.

| who asks | what for | by |
|---|---|---|
| the model's own forward | to scale, soft-cap and cast this rank's logits, or write into them | `map`, `score` |
| the loss of a model | a sum over this rank's tokens, without logits in memory | `loss_sum` |
| label smoothing, `compute_loss_func` | `log_softmax`, `gather`, `sum`, `cross_entropy` | `map`, `reduce` |
| ORPO, KTO, DPO, GRPO | `gather`, `logsumexp`, some rows and tokens | `reduce` |
| metrics, entropies, top-k | values of all tokens, or of chosen ones | `whole`, up to a limit |
| `token_losses`, `token_divergences` | one number per own token, from one model or two | `own_values`, `some` |
| poolers, classifiers, spans | a dense layer of each token, the first token, all | `map`, `token`, `whole` |
| generation | scores of a prompt's last token, hidden states | `Where.batch`, `Where.by_rows` |
| joined texts | the values of each text, from those of one row | `Where`, which alone knows them |
| FSDP2, DDP | the tensors in the outputs of a module | a node of pytree, a dataclass |
| `copy`, `pickle` | an `AttributeError` for what tensors do not have | `__getattr__` |
| `torch.compile` | a graph that ends where a function is called | `torch.compiler.disable` |

`__torch_function__` looks a function up by its name (`functions.py`). It is put off until numbers are needed, or
computed where tokens lie, some at a time. Any other function gets the whole value, or raises and says what to do.
"""
