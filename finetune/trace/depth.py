"""Few layers for many: which numbers of layers to trace, and what they say of the whole model."""

from dataclasses import replace

from transformers import PreTrainedConfig

from finetune.trace.accounts import Account
from finetune.trace.dry_run import ON_HOST, stepped
from finetune.trace.powers import MicroBatch
from finetune.trace.setting import Setting
from finetune.trace.shallow import Depth
from finetune.trace.spans import held_at, spans_of


def trace_depth(config: PreTrainedConfig, setting: Setting, traced: MicroBatch) -> Depth:
    """Trace a model of few layers.

    Args:
        config: of the shallow model.
        traced: rows and positions, of which ``prime_micro_batch`` says what they must be.
    """
    shaped = replace(setting, micro_batch_size=traced.rows, row_tokens=traced.row_tokens * setting.context)
    ledger = stepped(config, shaped, counts_work=True, scored=traced.scored)
    text = config.get_text_config()
    account = Account(ledger, {shaped.tokens, traced.scored}, text.vocab_size)
    place = setting.placement
    gpu, host = account.lives(ON_HOST if place.weights_on != "gpu" else frozenset())
    update = account.last_start_of("step")
    assert ledger.calls is not None
    return Depth(
        layers=text.num_hidden_layers,
        trained=dict(ledger.trained),
        spans=spans_of(ledger, account, gpu, traced),
        on_host=held_at(host, update - 1, traced),
        kernels=ledger.calls.kernels(traced),
        sent=ledger.calls.sent(traced),
        most_scored=ledger.most_scored,
    )
