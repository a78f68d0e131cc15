"""Memory and operations of the towers that encode a batch's images, and of what all GPUs have of the whole sequence."""

from .model import ModelSize, TowerSize, Training

_PROJECTOR = 4  # times a patch's hidden state that the last norm and the projector keep
_NONE = TowerSize(0, 0, 0, 0.0, 0, 0.0, False)


def encoded(model: ModelSize, training: Training) -> float:
    """The patches that one GPU encodes: of the GPU with the most images, where ranks share them."""
    tower = model.tower or _NONE
    images = -(-training.images // training.burst_size) if tower.dealt else training.images
    return images * training.image_tokens * tower.patches


def kept_by_towers(model: ModelSize, training: Training) -> float:
    """Bytes that towers keep from their forward pass until all layers behind them ran backward: the inputs of their
    layers, without checkpoints all that layers keep, and what projectors do. Towers that do not learn keep nothing."""
    tower = model.tower or _NONE
    row = tower.hidden + (0.0 if training.checkpointing else tower.kept)
    return 2 * encoded(model, training) * (tower.layers * row + _PROJECTOR * tower.hidden) * training.learns_to_see


def forward_of_towers(model: ModelSize, training: Training) -> float:
    """Bytes that come and go while a layer of a tower runs forward: at most what one would keep."""
    tower = model.tower or _NONE
    return 2 * encoded(model, training) * (tower.hidden + tower.kept)


def backward_of_towers(model: ModelSize, training: Training) -> float:
    """Bytes that come and go while a layer of a tower runs backward: what it keeps, if it is computed again, and its
    gradients. Beside it are the gradients of the embeddings of the whole sequence, before and behind the merge, and
    those of the features."""
    tower = model.tower or _NONE
    layer = 2 * encoded(model, training) * (2 * tower.hidden + tower.inner + training.checkpointing * tower.kept)
    return max(layer, whole_embeddings(model, training))


def whole_embeddings(model: ModelSize, training: Training) -> float:
    """Bytes of the embeddings of all tokens of a sequence, before and behind the merge with the features of images,
    and of the features: each GPU has all of them, and of their gradients."""
    return 2.0 * model.hidden * (2 * training.length + training.images * training.image_tokens)


def tower_products(model: ModelSize, training: Training) -> float:
    """Operations of products of matrices in towers, on one GPU: forward, for towers that learn backward, and for
    checkpointed ones forward once more."""
    passes = (3 + training.checkpointing) if training.learns_to_see else 1
    return 2.0 * passes * encoded(model, training) * (model.tower or _NONE).weights
