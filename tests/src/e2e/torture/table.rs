//! The results, by fault and kind of round.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::kind::Kind;
use super::record::{Line, Record, What};
use crate::cleanup;

/// What came of a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// As it should, after so long.
    Survived(Duration),
    /// The VM ended, or ended otherwise than it should.
    Ended(String),
    /// Nothing happened within the deadline.
    Hung(String),
    /// The guest found a wrong byte.
    Corrupt(String),
}

impl Verdict {
    /// If all went well, does what is next as well, which may go wrong. The time is the first one.
    pub fn then(self, next: impl FnOnce() -> anyhow::Result<Self>) -> anyhow::Result<Self> {
        let Self::Survived(after) = self else {
            return Ok(self);
        };
        Ok(match next()? {
            Self::Survived(_) => Self::Survived(after),
            other => other,
        })
    }
}

/// A fault of one round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Event {
    pub kind: Kind,
    pub name: Cow<'static, str>,
    pub verdict: Verdict,
}

impl Event {
    fn line(&self) -> String {
        let what = match &self.verdict {
            Verdict::Survived(after) => format!("ok after {:.1} s", after.as_secs_f64()),
            Verdict::Ended(why) => format!("ended: {why}"),
            Verdict::Hung(why) => format!("hung: {why}"),
            Verdict::Corrupt(why) => format!("WRONG BYTES: {why}"),
        };
        format!("{} by {}: {what}", self.name, self.kind.name())
    }
}

/// All of a run.
#[derive(Debug)]
pub(super) struct Results {
    /// What the order of faults follows from.
    seed: u64,
    /// When this part of the run began.
    begin: Instant,
    /// How long the parts before have taken.
    before: Duration,
    /// The number of the round; 0 before the first one.
    round: usize,
    events: Vec<Event>,
    /// Rounds that a hung testbed ended, with the reason.
    beds_lost: Vec<String>,
    record: Option<Record>,
}

/// Events that are no faults: a VM that started, memory that was verified after the last fault, and a
/// round that ended early.
pub(super) const STARTED: &str = "started";
pub(super) const VERIFIED: &str = "verified";
pub(super) const UNFINISHED: &str = "not finished";

impl Results {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            begin: Instant::now(),
            before: Duration::ZERO,
            round: 0,
            events: Vec::new(),
            beds_lost: Vec::new(),
            record: None,
        }
    }

    /// Continues a run of which a record has these lines, and adds to it.
    pub fn recorded(seed: u64, record: Record, lines: Vec<Line>) -> Self {
        let mut results = Self::new(seed);
        if let Some(last) = lines.last() {
            results.round = last.round;
            results.before = Duration::from_secs(last.seconds);
        }
        for line in lines {
            match line.what {
                What::Event(event) => results.events.push(event),
                What::BedLost(why) => results.beds_lost.push(why),
            }
        }
        results.record = Some(record);
        results
    }

    /// What the order of faults follows from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Begins the next round.
    pub fn begin_round(&mut self) {
        self.round += 1;
    }

    /// The number of the round; 0 before the first one.
    pub fn round(&self) -> usize {
        self.round
    }

    /// How long the run has taken.
    pub fn elapsed(&self) -> Duration {
        self.before + self.begin.elapsed()
    }

    /// Records an event, prints it, and returns whether it is no failure.
    pub fn add(&mut self, event: Event) -> anyhow::Result<bool> {
        cleanup::end_if_interrupted();
        let (seconds, line) = (self.elapsed().as_secs(), event.line());
        println!("torture: {seconds:>6} s: {line}");
        let is_good = matches!(event.verdict, Verdict::Survived(_));
        self.record(What::Event(event.clone()))?;
        self.events.push(event);
        Ok(is_good)
    }

    /// Records that the testbed hung, and prints it.
    pub fn add_lost_bed(&mut self, why: String) -> anyhow::Result<()> {
        cleanup::end_if_interrupted();
        println!("torture: round {}: testbed lost: {why}", self.round);
        self.record(What::BedLost(why.clone()))?;
        self.beds_lost.push(why);
        Ok(())
    }

    fn record(&mut self, what: What) -> anyhow::Result<()> {
        let (seed, round, seconds) = (self.seed, self.round, self.elapsed().as_secs());
        let Some(record) = &mut self.record else {
            return Ok(());
        };
        record.add(&Line {
            seed,
            round,
            seconds,
            what,
        })
    }

    fn count(&self, is: impl Fn(&Verdict) -> bool) -> usize {
        self.events
            .iter()
            .filter(|event| is(&event.verdict))
            .count()
    }

    /// Faults that were injected.
    pub fn faults(&self) -> usize {
        let is_fault = |event: &&Event| ![STARTED, VERIFIED, UNFINISHED].contains(&&*event.name);
        self.events.iter().filter(is_fault).count()
    }

    /// Events that did not end as they should.
    pub fn failures(&self) -> usize {
        self.count(|verdict| !matches!(verdict, Verdict::Survived(_)))
    }

    /// Whether nothing went wrong, and anything was tried.
    pub fn is_good(&self) -> bool {
        self.faults() > 0 && self.failures() == 0
    }

    /// A row for each fault and kind of round.
    pub fn table(&self) -> String {
        let mut rows: BTreeMap<(&str, Kind), Vec<&Verdict>> = BTreeMap::new();
        for event in &self.events {
            let row = rows.entry((&*event.name, event.kind)).or_default();
            row.push(&event.verdict);
        }
        let mut text = format!(
            "{:<22}{:<8}{:>6}{:>8}{:>7}{:>6}{:>9}{:>9}\n",
            "fault", "by", "times", "corrupt", "ended", "hung", "p50 s", "max s"
        );
        for ((name, kind), verdicts) in rows {
            let count = |is: fn(&Verdict) -> bool| verdicts.iter().filter(|one| is(one)).count();
            let survived = verdicts.iter().filter_map(|verdict| match verdict {
                Verdict::Survived(after) => Some(after.as_secs_f64()),
                _ => None,
            });
            let mut times: Vec<f64> = survived.collect();
            times.sort_by(f64::total_cmp);
            let at = |index: usize| times.get(index).copied().unwrap_or(f64::NAN);
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{name:<22}{:<8}{:>6}{:>8}{:>7}{:>6}{:>9.1}{:>9.1}",
                kind.name(),
                verdicts.len(),
                count(|verdict| matches!(verdict, Verdict::Corrupt(_))),
                count(|verdict| matches!(verdict, Verdict::Ended(_))),
                count(|verdict| matches!(verdict, Verdict::Hung(_))),
                at(times.len() / 2),
                at(times.len().saturating_sub(1)),
            );
        }
        text
    }

    /// The last line of a run.
    pub fn last_line(&self) -> String {
        format!(
            "torture: {} faults in {} min, {} with wrong bytes, {} ended the VM, {} hung, {} testbeds lost, \
             seed {}: {}",
            self.faults(),
            self.elapsed().as_secs() / 60,
            self.count(|verdict| matches!(verdict, Verdict::Corrupt(_))),
            self.count(|verdict| matches!(verdict, Verdict::Ended(_))),
            self.count(|verdict| matches!(verdict, Verdict::Hung(_))),
            self.beds_lost.len(),
            self.seed,
            if self.is_good() { "ok" } else { "FAILED" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::kind::{PageTransport, Replicas};
    use super::*;

    fn event(name: &'static str, verdict: Verdict) -> Event {
        with(Replicas::One, name, verdict)
    }

    fn with(replicas: Replicas, name: &'static str, verdict: Verdict) -> Event {
        Event {
            kind: Kind {
                transport: PageTransport::Tcp,
                replicas,
            },
            name: name.into(),
            verdict,
        }
    }

    #[test]
    fn a_run_without_faults_and_a_run_with_a_wrong_byte_are_not_good() {
        let mut results = Results::new(7);
        let add = |results: &mut Results, name, verdict| {
            let is_good = matches!(verdict, Verdict::Survived(_));
            assert_eq!(results.add(event(name, verdict)).unwrap(), is_good);
        };
        add(&mut results, VERIFIED, Verdict::Survived(Duration::ZERO));
        assert!(!results.is_good(), "nothing was injected");
        let survived = Verdict::Survived(Duration::from_secs(2));
        add(&mut results, "link cut", survived);
        assert!(results.is_good());
        add(&mut results, UNFINISHED, Verdict::Hung("no donor".into()));
        assert!(!results.is_good(), "a round that was not finished");
        add(&mut results, "link cut", Verdict::Corrupt("page 1".into()));
        assert!(!results.is_good());
        results.before = Duration::from_secs(120);
        let line = results.last_line();
        assert_eq!(
            line,
            "torture: 2 faults in 2 min, 1 with wrong bytes, 0 ended the VM, 1 hung, 0 testbeds lost, \
             seed 7: FAILED"
        );
    }

    #[test]
    fn the_line_of_an_event_says_what_came_of_it() {
        let survived = Verdict::Survived(Duration::from_millis(3460));
        assert_eq!(
            event("link cut", survived).line(),
            "link cut by tcp: ok after 3.5 s"
        );
        let wrong = with(Replicas::Two, VERIFIED, Verdict::Corrupt("page 1".into()));
        assert_eq!(wrong.line(), "verified by tcp x2: WRONG BYTES: page 1");
    }

    #[test]
    fn the_table_has_a_row_for_each_fault_and_kind_of_round() {
        let mut results = Results::new(7);
        for seconds in [1, 5, 3] {
            let verdict = Verdict::Survived(Duration::from_secs(seconds));
            results.add(event("link cut", verdict)).unwrap();
        }
        let hung = event("link cut", Verdict::Hung("threads".into()));
        results.add(hung).unwrap();
        let of_two = Verdict::Ended("exit code 5".into());
        let of_two = with(Replicas::Two, "link cut", of_two);
        results.add(of_two).unwrap();
        assert_eq!(results.faults(), 5);
        let table = results.table();
        let row = table.lines().nth(1).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            words,
            ["link", "cut", "tcp", "4", "0", "0", "1", "3.0", "5.0"]
        );
        let row = table.lines().nth(2).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[..7], ["link", "cut", "tcp", "x2", "1", "0", "1"]);
    }

    #[test]
    fn a_run_continues_where_its_record_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        let part = |seconds: u64| {
            let (record, lines) = Record::open(&path).unwrap();
            let mut results = Results::recorded(7, record, lines);
            results.before += Duration::from_secs(60);
            results.begin_round();
            let survived = Verdict::Survived(Duration::from_millis(seconds * 1000 + 460));
            results.add(event("link cut", survived)).unwrap();
            results
        };
        let (table, line) = {
            let mut first = part(3);
            first.add_lost_bed("host 2 hung".into()).unwrap();
            let hung = Verdict::Hung("no donor".into());
            first.add(event(UNFINISHED, hung)).unwrap();
            assert_eq!(first.round(), 1);
            (first.table(), first.last_line())
        };
        let (record, lines) = Record::open(&path).unwrap();
        let same = Results::recorded(7, record, lines);
        assert_eq!((same.table(), same.last_line()), (table, line));
        drop(same);
        let second = part(1);
        assert_eq!(
            (second.round(), second.faults(), second.failures()),
            (2, 2, 1)
        );
        assert_eq!(
            second.last_line(),
            "torture: 2 faults in 2 min, 0 with wrong bytes, 0 ended the VM, 1 hung, 1 testbeds lost, \
             seed 7: FAILED"
        );
    }

    #[test]
    fn what_comes_next_counts_only_while_all_went_well() {
        let survived = |seconds| Verdict::Survived(Duration::from_secs(seconds));
        let hung = Verdict::Hung("copies".into());
        let then = |first: Verdict, next: &Verdict| first.then(|| Ok(next.clone())).unwrap();
        assert_eq!(then(survived(2), &survived(60)), survived(2));
        assert_eq!(then(survived(2), &hung), hung);
        let ended = Verdict::Ended("exit code 5".into());
        let never = ended.clone().then(|| anyhow::bail!("nothing is next"));
        assert_eq!(never.unwrap(), ended);
    }
}
