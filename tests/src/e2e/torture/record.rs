//! A file with a line of JSON for each fault, by which a run continues after its process has ended.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::table::Event;

/// What a line says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Line {
    /// What the order of faults follows from.
    pub seed: u64,
    /// The number of the round; the first is 1.
    pub round: usize,
    /// How long the run had taken, without the time between its parts.
    pub seconds: u64,
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum What {
    /// A fault, or another event of a round.
    Event(Event),
    /// The testbed hung, for this reason.
    BedLost(String),
}

/// The file, which one run has at a time.
#[derive(Debug)]
pub(super) struct Record {
    file: File,
    path: PathBuf,
}

impl Record {
    /// Opens a file, or makes it, and returns the lines that it has.
    pub fn open(path: &Path) -> anyhow::Result<(Self, Vec<Line>)> {
        let shown = path.display();
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(path);
        let file = file.with_context(|| format!("the record {shown}"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => anyhow::bail!(
                "the record {shown} belongs to a run that has not ended; wait for it, or name another file"
            ),
            locked => locked.with_context(|| format!("locking the record {shown}"))?,
        }
        let mut text = String::new();
        let read = (&file).read_to_string(&mut text);
        read.with_context(|| format!("reading the record {shown}"))?;
        let mut lines: Vec<Line> = Vec::new();
        for (number, line) in (1..).zip(text.split_inclusive('\n')) {
            let refusal = || {
                format!(
                    "line {number} of the record {shown} is not one of a run; remove it, or name another file"
                )
            };
            // What is added would become part of a last line without an end.
            let line = line.strip_suffix('\n').with_context(refusal)?;
            let line: Line = serde_json::from_str(line).with_context(refusal)?;
            let seed = lines.first().map_or(line.seed, |first| first.seed);
            ensure!(
                line.seed == seed,
                "line {number} of the record {shown} has seed {}, and those before it {seed}; name a file \
                 with one run",
                line.seed
            );
            lines.push(line);
        }
        let path = path.to_owned();
        Ok((Self { file, path }, lines))
    }

    /// Adds a line.
    pub fn add(&mut self, line: &Line) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        let written = self.file.write_all(&text);
        written.with_context(|| format!("writing the record {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(seed: u64, round: usize) -> Line {
        Line {
            seed,
            round,
            seconds: 7,
            what: What::BedLost("host 1 hung".into()),
        }
    }

    #[test]
    fn lines_are_read_as_they_were_written_and_a_file_has_one_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        let (mut record, before) = Record::open(&path).unwrap();
        assert!(before.is_empty());
        record.add(&line(3, 1)).unwrap();
        let error = Record::open(&path).unwrap_err().to_string();
        assert!(error.contains("has not ended"), "{error}");
        drop(record);
        let (mut record, before) = Record::open(&path).unwrap();
        assert_eq!(before, [line(3, 1)]);
        record.add(&line(3, 2)).unwrap();
        drop(record);
        let (mut record, before) = Record::open(&path).unwrap();
        assert_eq!(before, [line(3, 1), line(3, 2)]);
        record.add(&line(4, 3)).unwrap();
        drop(record);
        let error = Record::open(&path).unwrap_err().to_string();
        assert!(
            error.contains("line 3") && error.contains("seed 4"),
            "{error}"
        );
    }

    #[test]
    fn a_file_of_another_kind_is_refused_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes");
        let torn = serde_json::to_string(&line(3, 1)).unwrap() + "\n{\"seed\":3,\"ro";
        let endless = torn.lines().next().unwrap();
        for text in ["my notes\n", &torn, endless, "\0\u{1}"] {
            std::fs::write(&path, text).unwrap();
            let error = Record::open(&path).unwrap_err().to_string();
            assert!(error.contains("is not one of a run"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        let missing = directory.path().join("none/record");
        let error = Record::open(&missing).unwrap_err().to_string();
        assert!(error.contains("none/record"), "{error}");
    }
}
