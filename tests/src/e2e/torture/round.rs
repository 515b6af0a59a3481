//! A round: donors, and a VM whose guest verifies memory and disk while faults are injected.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::fault::{End, Fault};
use super::kind::{Kind, PageTransport, Replicas};
use super::progress::{Donors, Goal, Judge, Progress, Seen};
use super::table::{Event, STARTED, VERIFIED, Verdict};
use crate::e2e::Context;
use crate::e2e::bed::add_rxe;
use crate::e2e::donor::{DONOR_2, Donor};
use crate::e2e::guest::{Guest, SHORT, exit, faultprobes};
use crate::e2e::stall;
use crate::e2e::status::{number, status};
use crate::testbed::{Host, Output, RemoteProcess};

/// The longest duration of a fault that the VM must survive: well within the grace time.
const FAULT_LONGEST: Duration = Duration::from_secs(4);
/// The grace time of donors.
const GRACE: &str = "20";
pub(super) const GRACE_SECONDS: u64 = 20;
/// The validity of a lease without a renewal.
const LEASE: &str = "40";
const LEASE_SECONDS: u64 = 40;
/// Time between two looks at a VM.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a process may take to end beyond what it waits for.
const END_DEADLINE: Duration = Duration::from_secs(30);

/// The name of the VM.
pub(super) const NAME: &str = "torture";
/// The port of the first donor; each further one has the next.
const FIRST_PORT: u16 = 7700;
/// What a donor lends: more than a VM asks one for.
const LENT: &str = "512M";
/// The third donor of a VM with two copies.
const THIRD: &str = "10.77.0.2:7702";
/// The file system of the guest's disk.
const ROOM: &str = "/tmp/torture-room";
const FILLER: &str = "/tmp/torture-room/filler";
/// What the guest prints when its disk returns other bytes than were written.
const DISK_CORRUPT: &str = "DISK-CORRUPT";

/// Writes to the disk and compares what it reads back, in the background; passes over memory all
/// the while. A write that fails for want of room is no fault of the product: the next one is
/// tried. The memory under test and the kernel's are more than is local, so that pages travel all
/// the time.
const WORK: &str = "(i=0; while :; do i=$(((i+1)%96)); dd if=/dev/urandom of=/tmp/w bs=64k count=4; \
    if dd if=/tmp/w of=/dev/vda bs=64k count=4 seek=$((i*4)) conv=fsync; then \
    echo 1 >/proc/sys/vm/drop_caches; dd if=/dev/vda of=/tmp/r bs=64k count=4 skip=$((i*4)) && \
    { cmp /tmp/w /tmp/r || echo DISK-CORRUPT >/dev/console; }; fi; sleep 1; done) >/dev/null 2>&1 & \
    while faultprobe --bytes 64M --passes 1; do :; done";

/// What is running.
pub(super) struct Round<'a> {
    pub context: &'a Context<'a>,
    pub kind: Kind,
    /// The donors that the VM should use.
    pub(super) donors: Vec<Donor>,
    /// The one that the fault is about.
    target: usize,
    /// The address of the one that was lost last.
    pub(super) lost: Option<String>,
    /// The port of the next donor.
    next_port: u16,
    pub vm: RemoteProcess,
    /// How long the guest took to boot.
    booted: Duration,
}

impl<'a> Round<'a> {
    /// Starts donors and a VM, and waits until the guest fetches pages; the event says whether it
    /// did.
    pub fn start(context: &'a Context<'a>, kind: Kind) -> anyhow::Result<(Self, Event)> {
        let testbed = context.testbed;
        testbed.clear_netem()?;
        if kind.transport == PageTransport::Rdma {
            for host in testbed.hosts() {
                let exists = host.run(&["rdma", "link", "show", "rxe0/1"], SHORT)?;
                if exists.status.code != 0 {
                    add_rxe(host)?;
                }
            }
        }
        let room = format!(
            "umount {ROOM} 2>/dev/null; mkdir -p {ROOM} && mount -t tmpfs -o size=32m room {ROOM} && \
             truncate -s 32M {ROOM}/disk.img"
        );
        testbed.host(1).check(&["sh", "-c", &room], SHORT)?;
        let ports = FIRST_PORT..FIRST_PORT + kind.donors();
        let next_port = ports.end;
        let donors = ports.map(|port| start_donor(context, port));
        let donors = donors.collect::<anyhow::Result<Vec<Donor>>>()?;
        let mut guest = Guest {
            // Less than usual: with two copies a lost donor's memory is copied again.
            memory: "192M",
            local_memory: Some("64M"),
            ..Guest::small(1, WORK)
        };
        // A full disk is an error for each block, and a character of an emulated console takes its
        // time.
        guest.cmdline.push_str(" loglevel=2 ssi_modules=virtio_blk");
        guest.more.extend(["--name", NAME, "--donor-grace", GRACE]);
        guest.more.extend(["--transport", kind.transport.flag()]);
        if kind.replicas == Replicas::Two {
            // In addition to the one that every such guest has.
            guest.more.extend(["--donor", DONOR_2, "--donor", THIRD]);
            guest.more.extend(["--replicas", "2"]);
        }
        guest
            .more
            .extend(["--disk", "path=/tmp/torture-room/disk.img"]);
        let begin = Instant::now();
        let vm = guest.boot(context)?;
        let round = Self {
            context,
            kind,
            donors,
            target: 0,
            lost: None,
            next_port,
            vm,
            booted: begin.elapsed(),
        };
        let event = round.event(STARTED, round.reach(Goal::Recovered)?)?;
        Ok((round, event))
    }

    /// The VM's host.
    pub fn vm_host(&self) -> &Host {
        self.context.testbed.host(1)
    }

    /// The donors' host.
    pub fn donor_host(&self) -> &Host {
        self.context.testbed.host(2)
    }

    /// The donor that the fault is about.
    pub fn target(&self) -> &Donor {
        &self.donors[self.target]
    }

    /// Removes it from the donors that the VM should use.
    pub(super) fn take_target(&mut self) -> Donor {
        let target = self.donors.swap_remove(self.target);
        self.target = 0;
        target
    }

    /// Starts one more donor, of which the VM does not know yet.
    pub(super) fn next_donor(&mut self) -> anyhow::Result<Donor> {
        let donor = start_donor(self.context, self.next_port)?;
        self.next_port += 1;
        Ok(donor)
    }

    /// The file that fills the file system of the disk.
    pub fn filler(&self) -> &'static str {
        FILLER
    }

    /// Injects a fault, heals it, and waits until memory travels again, and where there are two
    /// copies until all have both again.
    ///
    /// An error is one of the testbed; what the product does wrong is the event's verdict.
    pub fn try_fault(&mut self, fault: Fault, random: u64) -> anyhow::Result<Event> {
        self.target = chosen(random, self.donors.len());
        fault
            .inject(self)
            .with_context(|| format!("injecting {}", fault.name()))?;
        // The fault lasts for a time; the VM must not end within it.
        let ended = self.vm.wait(fault.duration(random, FAULT_LONGEST));
        let healed = fault
            .heal(self)
            .with_context(|| format!("healing {}", fault.name()));
        let verdict = match ended {
            // Of a process that is gone nothing can be healed.
            Ok(output) => ended_with(&output),
            Err(_) => {
                healed?;
                self.recover(fault)?
            }
        };
        self.event(fault.name(), verdict)
    }

    /// The event of a fault, unless the guest has found a wrong byte.
    fn event(&self, name: &'static str, verdict: Verdict) -> anyhow::Result<Event> {
        Ok(Event {
            kind: self.kind,
            name: name.into(),
            verdict: self.unless_corrupt(verdict)?,
        })
    }

    /// Waits until the VM has done something, from now on.
    pub(super) fn reach(&self, goal: Goal) -> anyhow::Result<Verdict> {
        let begin = Instant::now();
        let used: Vec<&str> = self.donors.iter().map(Donor::address).collect();
        let donors = Donors {
            used: &used,
            lost: self.lost.as_deref(),
        };
        let mut judge = Judge::new(goal, self.booted, begin);
        loop {
            // A host has one CPU, which the VM shares with whoever looks at it.
            if let Ok(output) = self.vm.wait(LOOK_EVERY) {
                return Ok(ended_with(&output));
            }
            let status = status(self.vm_host(), &[NAME]);
            let progress = status.map(|status| Progress::of(&status, &self.vm.stdout(), donors));
            match judge.look(Instant::now(), progress.ok().transpose()?) {
                Seen::Reached => return Ok(Verdict::Survived(begin.elapsed())),
                Seen::Pending => {}
                Seen::Hung(why) => {
                    for host in self.context.testbed.hosts() {
                        host.check_health()?;
                    }
                    return self.hung(&why);
                }
            }
        }
    }

    /// The verdict on a VM that does nothing, whose state is kept.
    pub(super) fn hung(&self, why: &str) -> anyhow::Result<Verdict> {
        let path = self.context.artifacts.join("hung.txt");
        let state = status(self.vm_host(), &[NAME])
            .map_or_else(|error| format!("{error:#}"), |state| format!("{state:#}"));
        let (console, errors) = (self.vm.stdout(), self.vm.stderr());
        let text = format!(
            "{why}\n\n{}\n\n{state}\n\n{console}\n\n{errors}",
            stall::threads_of(self.vm_host(), self.vm.pid())
        );
        std::fs::write(&path, text)?;
        Ok(Verdict::Hung(format!("{why}; see {}", path.display())))
    }

    /// The verdict, unless the guest has found a wrong byte.
    fn unless_corrupt(&self, verdict: Verdict) -> anyhow::Result<Verdict> {
        let console = self.vm.stdout();
        // The kernel prints its command line, which has the text as well.
        let mut lines = console.lines();
        if lines.any(|line| line.contains(DISK_CORRUPT) && !line.contains("faultprobe")) {
            return Ok(Verdict::Corrupt("a disk returned other bytes".into()));
        }
        // A line that is not whole yet is read the next time.
        let whole = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let probes = faultprobes(whole)?;
        let corrupt = probes.iter().find(|probe| probe["corrupt_bytes"] != 0);
        Ok(corrupt.map_or(verdict, |probe| Verdict::Corrupt(probe.to_string())))
    }

    /// Waits until the guest has verified all of its memory after the last fault.
    pub fn verify(&self) -> anyhow::Result<Event> {
        // The pass that runs now began before the last fault was healed; the next one did not.
        self.event(VERIFIED, self.reach(Goal::Passes(2))?)
    }

    /// Ends the VM by a fault, and checks that everything ends within its deadline.
    pub fn end(self, end: End) -> anyhow::Result<Event> {
        let begin = Instant::now();
        let grace = Duration::from_secs(GRACE_SECONDS);
        let verdict = match end {
            End::KillDonors => {
                for donor in &self.donors {
                    self.donor_host().signal(donor.pid(), libc::SIGKILL)?;
                }
                self.expect_donor_lost(grace)?
            }
            End::Partition => {
                self.context.testbed.cut_link(1, 2)?;
                let verdict = self.expect_donor_lost(grace)?;
                self.context.testbed.restore_link(1, 2)?;
                verdict
            }
            End::Interrupt => {
                self.vm_host().signal(self.vm.pid(), libc::SIGINT)?;
                self.expect_end(Duration::ZERO, |output| {
                    output.status.code == exit::INTERRUPTED
                })?
            }
            End::KillVm => {
                self.vm_host().signal(self.vm.pid(), libc::SIGKILL)?;
                let killed = self.expect_end(Duration::ZERO, |output| {
                    output.status.signal == libc::SIGKILL
                })?;
                match killed {
                    Verdict::Survived(_) => self.expect_memory_back()?,
                    other => other,
                }
            }
        };
        let verdict = match verdict {
            Verdict::Survived(_) => Verdict::Survived(begin.elapsed()),
            other => other,
        };
        let event = self.event(end.name(), verdict)?;
        Donor::kill_all(self.donors)?;
        Ok(event)
    }

    fn expect_donor_lost(&self, grace: Duration) -> anyhow::Result<Verdict> {
        self.expect_end(grace, |output| {
            let names = |donor: &Donor| output.stderr.contains(donor.address());
            output.status.code == exit::DONOR_LOST && self.donors.iter().any(names)
        })
    }

    /// Waits for the VM's end, which must be as `is_right` says.
    fn expect_end(
        &self,
        grace: Duration,
        is_right: impl Fn(&Output) -> bool,
    ) -> anyhow::Result<Verdict> {
        match self.vm.wait(grace + END_DEADLINE) {
            Ok(output) if is_right(&output) => Ok(Verdict::Survived(Duration::ZERO)),
            Ok(output) => Ok(ended_with(&output)),
            Err(error) => {
                self.context.testbed.host(1).check_health()?;
                self.hung(&error.to_string())
            }
        }
    }

    /// Waits until the donors have their memory back from a VM that cannot return it.
    fn expect_memory_back(&self) -> anyhow::Result<Verdict> {
        let deadline = Instant::now() + Duration::from_secs(LEASE_SECONDS) + END_DEADLINE;
        loop {
            let now = status(self.donor_host(), &[])?;
            let nodes = now["nodes"].as_array().context("no list of nodes")?;
            let leases = nodes.iter().map(|node| number(node, "/leases"));
            let leases = leases.collect::<anyhow::Result<Vec<u64>>>()?;
            if leases.len() == self.donors.len() && leases.iter().all(|&leases| leases == 0) {
                return Ok(Verdict::Survived(Duration::ZERO));
            }
            if Instant::now() > deadline {
                return Ok(Verdict::Hung(format!("a donor keeps the lease: {now}")));
            }
        }
    }
}

fn start_donor(context: &Context<'_>, port: u16) -> anyhow::Result<Donor> {
    Donor::listening(context, (2, port), LENT, &["--lease-seconds", LEASE])
}

/// Returns which of so many donors a fault is about, from a random number whose lowest bits say how
/// long it lasts.
fn chosen(random: u64, donors: usize) -> usize {
    let at = (random >> 8) % donors.max(1) as u64;
    usize::try_from(at).unwrap_or(0)
}

/// The verdict on a VM that has ended although it should not, or otherwise than it should.
pub(super) fn ended_with(output: &Output) -> Verdict {
    Verdict::Ended(format!("{}: {}", output.status, last_line(&output.stderr)))
}

/// The last line that is not empty.
pub(super) fn last_line(text: &str) -> String {
    let mut lines = text.lines().rev();
    let last = lines.find(|line| !line.trim().is_empty());
    last.unwrap_or("no message").to_owned()
}

/// Fails unless the work fits the guest's command line, which a kernel cuts at 2,048 bytes.
pub(super) fn check_work() -> anyhow::Result<()> {
    ensure!(
        WORK.len() < 1500,
        "the guest's work has {} bytes",
        WORK.len()
    );
    ensure!(
        !WORK.contains('"'),
        "a quotation mark would end the parameter"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e2e::random::SplitMix;

    #[test]
    fn each_donor_is_chosen_and_the_only_one_always() {
        let mut random = SplitMix::new(1);
        let mut times = [0; 3];
        for _ in 0..300 {
            let random = random.next();
            times[chosen(random, 3)] += 1;
            assert_eq!(chosen(random, 1), 0);
        }
        assert!(times.iter().all(|&times| times > 50), "{times:?}");
        assert_eq!(chosen(5, 0), 0);
    }
}
