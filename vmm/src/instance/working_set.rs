//! `--record-working-set` and `--replay-working-set`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory_fabric::fabric::{Fabric, FabricConfig};
use memory_fabric::working_set::{self, Subject};

use super::run_error::RunError;
use crate::config::RunConfig;
use crate::failure::{Failure, describe};
use crate::progress::Followed;

/// The working set to record.
#[derive(Debug)]
pub struct WorkingSet {
    record: Option<(PathBuf, Subject)>,
    /// Number of pages to replay.
    replayed: u64,
}

impl WorkingSet {
    /// Reads the working set of an earlier run, and checks whether this one can be recorded. An
    /// unsuitable file is ignored with a warning: the guest boots without it.
    pub fn prepare(config: &RunConfig, fabric: &mut FabricConfig) -> Result<Self, Failure> {
        let (record, replay) = (&config.record_working_set, &config.replay_working_set);
        if record.is_none() && replay.is_none() {
            return Ok(Self {
                record: None,
                replayed: 0,
            });
        }
        let mut image = vec![config.kernel.as_path()];
        image.extend(config.initrd.as_deref());
        let subject = Subject::new(&fabric.ram, &image)
            .map_err(RunError::host("read the kernel or initial RAM disk"))?;
        if let Some(path) = replay {
            match working_set::load(path, &subject) {
                Ok(runs) => fabric.replay = runs,
                Err(error) => tracing::warn!(
                    "--replay-working-set {} is ignored: {}",
                    path.display(),
                    describe(&error)
                ),
            }
        }
        let record = match record {
            None => None,
            Some(path) => {
                working_set::check_writable(path)?;
                Some((path.clone(), subject))
            }
        };
        let pages = fabric.replay.iter().map(|run| u64::from(run.count));
        Ok(Self {
            record,
            replayed: pages.sum(),
        })
    }

    /// Displays the progress of the replay, which continues while the guest boots. Pages without
    /// room in memory count as done.
    #[must_use]
    pub fn follow(&self, fabric: &Fabric) -> Followed {
        let (stats, pages) = (Arc::clone(fabric.stats()), self.replayed);
        let done = move || pages.saturating_sub(stats.replay_left.load(Ordering::Relaxed));
        Followed::begin("replaying the working set", pages, "pages", done)
    }

    /// Writes the recorded working set. Returns an error as a single line.
    pub fn save(&self, fabric: &Fabric) -> Option<String> {
        let (path, subject) = self.record.as_ref()?;
        // Nothing is recorded when all memory is local.
        let (runs, cut) = fabric.working_set().unwrap_or_default();
        if cut {
            tracing::warn!(
                limit = working_set::RUNS_MAX,
                "the guest touched more runs of pages than are recorded"
            );
        }
        let saved = working_set::save(path, &working_set::encode(subject, &runs));
        saved.err().map(|error| describe(&error))
    }
}
