"""Train one step on its images: survey, resume, iterate, validate, keep the best model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from sdrseg.config import Config
from sdrseg.datasets.batches import survey_batches, train_batches
from sdrseg.datasets.order import TrainOrder
from sdrseg.engine.best import Best
from sdrseg.engine.checkpoint import load_models, load_training, training_tensors, with_prefix
from sdrseg.engine.evaluate import as_shown, score
from sdrseg.engine.fit import fit, skipped, survey
from sdrseg.engine.job import Job
from sdrseg.engine.kept import Kept
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.speed import make_pass
from sdrseg.engine.watch import Watch
from sdrseg.methods import Method
from sdrseg.methods.base import When
from sdrseg.methods.own import require_state_dict
from sdrseg.network import Network
from sdrseg.scenario import Step

Assembled = tuple[Method, Network, Network | None]  # method, student, teacher


class StepTraining:
    """The training of one step. Call `run` once."""

    def __init__(self, job: Job, step: Step, config: Config, assembled: Assembled, retry: int = 0):
        """`retry`: how often the learning rate was lowered after a divergence, which a resumed step has to know."""
        self.job, self.step, self.config, self._retry = job, step, config, retry
        self.method, self.student, self.teacher = assembled
        self._data: Any = (job.source, step.train_ids, step.train_table, config)
        self._options: Any = {"share": job.share, "cache": job.cache("train", "train", step.train_ids)}
        self._batches = train_batches(*self._data, **self._options)
        assert isinstance(self._batches.order, TrainOrder)
        self._order = self._batches.order
        self.iterations = len(self._order)
        self._best = Best(config)
        self._kept = Kept(job, step)

    def run(self) -> bool:
        """Train from the saved state if there is one, else from the beginning; return whether an image was
        unreadable."""
        job, number = self.job, self.step.number
        state = job.folder.load_state(number)
        bad: Counter[str] = Counter()
        if state is None:
            bad += self._survey("before")
            require_state_dict(self.method)  # which may have been made in the survey
            job.log.cut_step(number)
        how, found = self._iterate(state) if self.method.iterates(number) else ("survey", Counter())
        bad += found + self._survey("after")
        job.log.write("passes", step=number, how=how, **({"bad_images": dict(bad)} if bad else {}))
        if bad:
            job.display.say(f"step {number}: {skipped(bad)}")
        return bool(bad)

    def _survey(self, when: When) -> Counter[str]:
        """A survey, if the method wants one; returns the unreadable images with their counts."""
        if not self.method.wants_survey(when):
            return Counter()
        views = self.method.survey_views(self.step.number)
        batches = survey_batches(*self._data, **self._options, views=views)
        bad = survey(self.job.fabric, self.method, self.student, self.teacher, batches, when)
        for note in self.method.notes:
            self.job.display.say(f"step {self.step.number}: {note}")
        self.method.notes.clear()
        return self.job.processes.counted(bad)

    def _iterate(self, state: tuple[dict[str, Any], dict[str, Tensor]] | None) -> tuple[str, Counter[str]]:
        """All iterations; returns how passes were computed, and the unreadable images with their counts."""
        job, config = self.job, self.config
        if state is not None:
            load_models(state[1], self.student, self.method, job.fabric.device)
        optimiser = make_optimiser(self.student, self.method, config)
        facts: dict[str, Any] = {"iteration": 0, "bad_images": {}} if state is None else self._resume(*state, optimiser)
        wrapped, self._optimiser = job.fabric.setup(self.student, optimiser)
        self._watch = self._make_watch(facts)
        job.interruption.save = self._save
        alike = job.iterations_alike(self.step)
        compute = make_pass(job.fabric, self.method, wrapped, self.teacher, config, alike, job.display.say)
        if not self._stopped_before(facts["iteration"]):
            hooks = (self._save, self._validate, job.interruption.check)
            fit(job.fabric, compute, self._optimiser, self._batches, config, self._watch, *hooks)
        job.interruption.save = None
        self._restore_best()
        return compute.how, job.processes.counted(self._watch.bad)

    def _make_watch(self, facts: dict[str, Any]) -> Watch:
        job, run, number = self.job, self.config.run, self.step.number
        watch = Watch(
            number,
            self.iterations,
            job.log,
            job.display.update,
            run.log_every,
            60 * run.save_minutes,
            facts["iteration"],
            self.config.train.epochs,
            {term.name: job.config.source_of(term.weight, number) for term in self.method.known_terms if term.weight},
            job.config.source_of("optim.lr", number),
        )
        if job.processes.rank == 0:
            watch.bad.update(facts["bad_images"])
        return watch

    # --- the state within the step ----------------------------------------------------------------------------------

    def _resume(self, facts: dict[str, Any], tensors: dict[str, Tensor], optimiser: Any) -> dict[str, Any]:
        job, number, iteration = self.job, self.step.number, facts["iteration"]
        load_training(tensors, optimiser)
        self._order.load_state_dict(facts["order"])
        job.log.cut(facts["log_bytes"])
        job.log.write("resume", step=number, iteration=iteration)
        job.display.say(f"step {number}: resuming at iteration {iteration} of {self.iterations}")
        self._best.load(facts["best"], tensors)
        return {"bad_images": {}, **facts}

    def _save(self) -> None:
        if self.job.processes.rank == 0:
            facts = {"step": self.step.number, "iteration": self._watch.iteration, "order": self._order.state_dict()}
            facts |= {"bad_images": self._watch.bad, "log_bytes": self.job.log.size, "best": self._best.facts()}
            facts["retries"] = self._retry
            tensors = training_tensors(self.student, self._optimiser, self.method)
            self.job.folder.save_state(tensors | with_prefix("best", self._best.tensors), facts)

    # --- the best model ---------------------------------------------------------------------------------------------

    def _score(self, epoch: int) -> float | None:
        job, number = self.job, self.step.number
        found = score(job, self.step, self.student, self.method.decision, ids=job.watched(self.step))
        miou = found.miou()
        kept = self._kept.share(self.student, self.method.decision)
        more = {} if kept is None else {"kept": kept}
        job.log.write("validate", step=number, epoch=epoch, miou=miou, scored_on=job.scored_on, **more)
        job.display.validated(number, epoch, as_shown(job, self.step, found).miou() | more, job.oracle)
        return miou["all"] if miou["all"] is None or kept is None else miou["all"] * kept

    def _validate(self, epoch: int) -> bool:
        """Score the model after an epoch if that is due; returns whether to stop early."""
        best, every = self._best, self.config.eval.every
        due = best.every > 0 and epoch % best.every == 0
        if not due and not (every and epoch % every == 0):
            return False
        score = self._score(epoch)
        return due and best.see(epoch, score, self.student, self.method)

    def _stopped_before(self, done: int) -> bool:
        """Whether a run that was killed after saving the end of an epoch, before its score, would have stopped."""
        epoch, rest = divmod(done, self._order.batches_per_epoch)
        missed = 0 < done < self.iterations and rest == 0 and self._best.last < epoch
        return missed and self._best.every > 0 and self._validate(epoch)

    def _restore_best(self) -> None:
        best, job, number, epochs = self._best, self.job, self.step.number, self.config.train.epochs
        if best.every == 0:
            return
        if self._watch.iteration == self.iterations:
            best.see(epochs, self._score(epochs), self.student, self.method)
        best.restore(self.student, self.method, job.fabric.device)
        job.log.write("best", step=number, **best.facts())
        job.display.say(f"step {number}: the best model is that of epoch {best.epoch}")
