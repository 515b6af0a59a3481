//! Donors that come and go while a VM with two copies runs.

use std::time::{Duration, Instant};

use super::fault::Fault;
use super::kind::Replicas;
use super::progress::Goal;
use super::round::{NAME, Round, ended_with, last_line};
use super::table::Verdict;

/// How long `ssi-hv` waits until memory has moved, in seconds.
const MOVE_SECONDS: &str = "300";
/// Deadline of the command: that time, and a margin for a busy host.
const ORDER_DEADLINE: Duration = Duration::from_secs(360);

impl Round<'_> {
    /// Waits until memory travels again after a fault was healed. With two copies the VM gets a new
    /// donor for one that was lost, and the next fault comes only when each page has both
    /// copies: it may cost any one of them.
    pub(super) fn recover(&mut self, fault: Fault) -> anyhow::Result<Verdict> {
        let recovered = self.reach(Goal::Recovered)?;
        if self.kind.replicas == Replicas::One {
            return Ok(recovered);
        }
        let restored = recovered.then(|| self.restore_donors(fault))?;
        restored.then(|| self.reach(Goal::Whole))
    }

    fn restore_donors(&mut self, fault: Fault) -> anyhow::Result<Verdict> {
        match fault {
            Fault::LoseDonor | Fault::FreezeDonor => self.replace_target(),
            Fault::DrainDonor => self.drain_and_join(),
            _ => Ok(Verdict::Survived(Duration::ZERO)),
        }
    }

    /// Has a new donor join for the target once the other ones have its copies. One that
    /// was frozen may have returned; it is killed as well.
    fn replace_target(&mut self) -> anyhow::Result<Verdict> {
        let target = self.take_target();
        self.lost = Some(target.address().to_owned());
        target.kill()?;
        let repaired = self.reach(Goal::Repaired)?;
        repaired.then(|| {
            let new = self.next_donor()?;
            let joined = self.order(&["rebalance", NAME, "--add", new.address()]);
            self.donors.push(new);
            joined
        })
    }

    /// Drains the target, and has it join again.
    fn drain_and_join(&self) -> anyhow::Result<Verdict> {
        let address = self.target().address();
        let drained = self.order(&["drain", NAME, "--node", address])?;
        drained.then(|| self.order(&["rebalance", NAME, "--add", address]))
    }

    /// Runs a command of `ssi-hv` that moves memory, until it has moved.
    fn order(&self, words: &[&str]) -> anyhow::Result<Verdict> {
        let begin = Instant::now();
        let argv = [&["ssi-hv"][..], words, &["--wait", MOVE_SECONDS]].concat();
        let output = self.vm_host().run(&argv, ORDER_DEADLINE)?;
        if output.status.code == 0 {
            return Ok(Verdict::Survived(begin.elapsed()));
        }
        // The end of the VM is the reason then.
        if let Ok(ended) = self.vm.wait(Duration::ZERO) {
            return Ok(ended_with(&ended));
        }
        let why = last_line(&output.stderr);
        self.hung(&format!("{}: {}: {why}", argv.join(" "), output.status))
    }
}
