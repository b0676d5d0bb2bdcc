"""Linear attention: the softmax replaced by a product of features, so that keys and values are summed once for all queries.

Paper: Katharopoulos, Vyas, Pappas and Fleuret 2020, 2006.16236. Rotary positions: Su et al. 2021, 2104.09864, eq. 19.
Equation: out_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), with phi(x) = elu(x) + 1 and R the
    rotation of a rotary encoding, which the denominator does without: rotated features are no longer positive.
Cost: 4 n d^2 multiply-adds a head; causal, 2 n c (d + d) more for chunks of c tokens. Decoding keeps d^2 + d numbers a head.
Deviations: the denominator is bounded by 1e-6 from below, where the paper's code adds 1e-6 to it.
"""

from jaxtyping import Float
from torch import Tensor

from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.feature_maps import elu1
from anyformer.ops.linear import LinearState, linear_attention, linear_attention_with_state


class Linear(Attention):
    """Each query reads one sum over all keys instead of the keys. No knobs.

    There are no weights to drop, so dropout acts on the output. Queries and keys enter without a factor: elu has its own scale.
    """

    name = "linear"
    summary = "keys and values are summed once; each query reads the sum through positive features"
    paper = "Katharopoulos et al. 2020, 2006.16236"
    family = ("order of the product", "linear")
    forms = (Form.ROTATE, Form.TURN, Form.EMBED)
    later = {
        Form.DECAY: "a running sum that fades with distance",
        Form.TOEPLITZ: "a fast Fourier transform over offsets",
        Form.AUGMENT: "random features of the widened queries and keys",
        Form.TABLE: "a band of exact pairs and prefix sums beyond the clip",
        Form.VALUE: "the same band and prefix sums on values",
    }
    refusal = (
        "it compares no pair of query and key, so there is no score to change; use an encoding that is added at the embedding or "
        "rotates, such as sinusoidal or rope"
    )
    decodes = "state"
    rotates = "self"
    weights = False

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        encoding, cache, keys = context.encoding, context.cache, context.keys
        v = v if encoding.turn is None else encoding.turn(v)
        q_den = k_den = None
        if encoding.rotate is not None:
            q_den, k_den = elu1(q), elu1(k)
            q, k = encoding.rotate(q_den, k_den)
        features = "elu1" if encoding.rotate is None else "given"
        if cache is None:
            out = linear_attention(
                q,
                k,
                v,
                causal=context.causal,
                keep=keys.keep,
                documents=keys.documents,
                q_den=q_den,
                k_den=k_den,
                features=features,
            )
        else:
            out, state = linear_attention_with_state(
                q,
                k,
                v,
                state=LinearState(cache.state["s"], cache.state["z"]) if cache.state else None,
                keep=keys.keep,
                documents=keys.documents,
                q_den=q_den,
                k_den=k_den,
                features=features,
            )
            cache.state |= state._asdict()
        return out if encoding.turn_back is None else encoding.turn_back(out)
