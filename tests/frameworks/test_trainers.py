"""Trainers derived from Hugging Face's: sentence-transformers and TRL."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from frameworks.real import need, run, same, state

pytestmark = pytest.mark.filterwarnings("default")
TOKENS, ROWS, STEPS = 32, 16, 4
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "bf16": False,
}
Train = Callable[[int, str, list[Any]], nn.Module]


def tokens(row: int) -> list[int]:
    return torch.randint(4, TOKENS, (6,), generator=torch.Generator().manual_seed(row)).tolist()


def embedded(rank: int, folder: str, callbacks: list[Any]) -> nn.Module:
    """sentence-transformers, with a bag of embeddings as model."""
    import datasets
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses, modules

    tokenizer = words()
    torch.manual_seed(rank)
    static = modules.StaticEmbedding(tokenizer, embedding_dim=8)
    model = st.SentenceTransformer(modules=[static], device="cpu")
    texts = [" ".join(f"w{t}" for t in tokens(row)) for row in range(2 * ROWS)]
    rows = {"a": texts[:ROWS], "b": texts[ROWS:], "score": [row / ROWS for row in range(ROWS)]}
    st.SentenceTransformerTrainer(
        model=model,
        args=st.SentenceTransformerTrainingArguments(output_dir=folder, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict(rows),
        loss=losses.CosineSimilarityLoss(model),
        callbacks=callbacks,
    ).train()
    return model


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{n}" for n in range(4, TOKENS))]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def tuned(rank: int, folder: str, callbacks: list[Any]) -> nn.Module:
    """TRL's SFTTrainer, with a model of two layers."""
    import datasets
    import transformers
    import trl

    torch.manual_seed(rank)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=folder, max_length=16, packing=False, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict({"input_ids": [tokens(r) for r in range(ROWS)]}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words(), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
        ),
        callbacks=callbacks,
    ).train()
    return model


def both(rank: int, size: int, train: Train, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from offbeat.integrations.transformers import OffbeatCallback

        os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=folder, HF_DATASETS_CACHE=folder)
        found: list[dict[str, Tensor]] = [state(train(rank, folder, []))]  # under DDP
        stats = []
        for strategy in (offbeat.LocalSGD(period=1), offbeat.StreamingAveraging()):
            callback = OffbeatCallback(strategy, {"timeout_seconds": 20})
            found.append(state(train(rank, folder, [callback])))
            assert callback.sync is not None
            stats.append(callback.sync.stats)
    return found, stats


@pytest.mark.parametrize(
    ("package", "train"), [("sentence_transformers", embedded), ("trl", tuned)]
)
def test_local_sgd_of_one_step_is_ddp(package: str, train: Train, tmp_path: Any) -> None:
    need(package)
    results = run(both, train, str(tmp_path))
    for (ddp, local, streaming), stats in results:
        same(local, ddp, 1e-6)
        same(streaming, results[0][0][2])
        assert not torch.equal(*(next(iter(one.values())) for one in (ddp, streaming)))
        assert [one.steps for one in stats] == [STEPS] * 2
        assert stats[0].syncs == STEPS
