"""Linear attention: the softmax replaced by a product of features, so that keys and values are summed once for all queries.

Paper: Katharopoulos, Vyas, Pappas and Fleuret 2020, 2006.16236. Rotary positions: Su et al. 2021, 2104.09864, eq. 19.
Equation: out_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), with phi(x) = elu(x) + 1 and R the
    rotation of a rotary encoding, which the denominator does without: rotated features are no longer positive.
Decoding: a state of d^2 + d numbers a key head.
Deviations: the denominator is bounded by 1e-6 from below, where the paper's code adds 1e-6 to it.
"""

from jaxtyping import Float
from torch import Tensor

from anyformer.attention import _features
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.feature_maps import elu1


class Linear(Attention):
    """Each query reads one sum over all keys instead of the keys. No knobs.

    There are no weights to drop, so dropout acts on the output. Queries and keys enter without a factor: elu has its own scale.
    """

    name = "linear"
    summary = "keys and values are summed once; each query reads the sum through positive features"
    paper = "Katharopoulos et al. 2020, 2006.16236"
    family = ("order of the product", "linear")
    forms = (
        Form.ROTATE,
        Form.TURN,
        Form.GATES,
        Form.DECAY,
        Form.TOEPLITZ,
        Form.CLIPPED,
        Form.GRID,
        Form.BOXES,
        Form.EMBED,
    )
    refusal = _features.REFUSAL
    decodes = "state"
    keyed = _features.KEYED
    rotates = "self"
    weights = False

    def cost(self) -> Cost:
        """Keys times values, summed once, and queries times the sum."""
        return Cost(self.site, "h n d^2 + k m d^2", memory="k d^2")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        rotate = context.encoding.rotate
        if rotate is None:
            return _features.attend(q, k, v, context, elu1=True)
        raw = q, k
        q, k = elu1(q), elu1(k)
        rotated_q, rotated_k = rotate(q, k)
        return _features.attend(rotated_q, rotated_k, v, context, raw=raw, q_den=q, k_den=k)
