//! Faults: what each does to the hosts and processes of a round, and how it is healed.

use std::time::Duration;

use anyhow::Context as _;

use super::kind::{Kind, PageTransport, Replicas};
use super::round::Round;
use crate::e2e::bed::{add_rxe, remove_rxe};
use crate::e2e::guest::SHORT;
use crate::testbed::Host;

/// Share of the packets that a faulty link loses or corrupts, each way.
const LOSS: &str = "loss 5%";
const CORRUPTION: &str = "corrupt 1%";
/// Rate of a link that still carries packets, each way: about eight pages a second.
const TRICKLE: &str = "rate 256kbit";
/// By how much a clock steps, in seconds: longer than any lease and any deadline of the product.
const CLOCK_STEP_SECONDS: i64 = 3600;
/// Limit of open files while they are exhausted: below what a running process has open.
const FILES_EXHAUSTED: &str = "--nofile=3:";
/// How long a donor is frozen that may not return: the grace time, and what it takes to notice that
/// it does not renew its lease.
const FREEZE: Duration = Duration::from_secs(super::round::GRACE_SECONDS + 10);

/// A fault that a VM must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// The donor's process is stopped and continued.
    StopDonor,
    /// The VM's process is stopped and continued.
    StopVm,
    /// The link is down.
    CutLink,
    /// The link loses packets.
    LosePackets,
    /// The link flips bits.
    CorruptPackets,
    /// The link carries a few pages a second.
    Trickle,
    /// The kernel resets the TCP connections.
    Reset,
    /// The clock of the VM's host steps forward, and back.
    ClockOfVm,
    /// The clock of the donor's host steps forward, and back.
    ClockOfDonor,
    /// The VM can open no file, while its connections break.
    FilesOfVm,
    /// The donor can open no file, while its connections break.
    FilesOfDonor,
    /// The file system of the guest's disk is full.
    FullDisk,
    /// The VM's RDMA device is removed and added.
    RdmaDevice,
    /// A donor is killed and does not return, and a new one joins.
    LoseDonor,
    /// A donor is stopped for longer than the grace time, and a new one joins.
    FreezeDonor,
    /// A donor is drained, and joins again.
    DrainDonor,
}

impl Fault {
    const ALL: [Self; 16] = [
        Self::StopDonor,
        Self::StopVm,
        Self::CutLink,
        Self::LosePackets,
        Self::CorruptPackets,
        Self::Trickle,
        Self::Reset,
        Self::ClockOfVm,
        Self::ClockOfDonor,
        Self::FilesOfVm,
        Self::FilesOfDonor,
        Self::FullDisk,
        Self::RdmaDevice,
        Self::LoseDonor,
        Self::FreezeDonor,
        Self::DrainDonor,
    ];

    /// Those that mean something to a kind of round.
    pub(super) fn of(kind: Kind) -> Vec<Self> {
        let applies = |fault: &Self| match fault {
            // QUIC has no connection that the kernel could reset.
            Self::Reset => kind.transport != PageTransport::Udp,
            Self::RdmaDevice => kind.transport == PageTransport::Rdma,
            // With the only copy of the memory the VM would end.
            Self::LoseDonor | Self::FreezeDonor | Self::DrainDonor => {
                kind.replicas == Replicas::Two
            }
            _ => true,
        };
        Self::ALL.into_iter().filter(applies).collect()
    }

    /// Its name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::StopDonor => "donor stopped",
            Self::StopVm => "VM stopped",
            Self::CutLink => "link cut",
            Self::LosePackets => "5 % packet loss",
            Self::CorruptPackets => "1 % packets corrupt",
            Self::Trickle => "link trickles",
            Self::Reset => "connections reset",
            Self::ClockOfVm => "VM's clock steps",
            Self::ClockOfDonor => "donor's clock steps",
            Self::FilesOfVm => "VM without files",
            Self::FilesOfDonor => "donor without files",
            Self::FullDisk => "disk full",
            Self::RdmaDevice => "RDMA device removed",
            Self::LoseDonor => "donor lost, new one",
            Self::FreezeDonor => "donor frozen, new one",
            Self::DrainDonor => "donor drained, back",
        }
    }

    /// Injects it.
    pub(super) fn inject(self, round: &Round<'_>) -> anyhow::Result<()> {
        let (vm_host, donor_host) = (round.vm_host(), round.donor_host());
        match self {
            Self::StopDonor | Self::FreezeDonor => {
                donor_host.signal(round.target().pid(), libc::SIGSTOP)?;
            }
            Self::LoseDonor => donor_host.signal(round.target().pid(), libc::SIGKILL)?,
            // What restores the donors does it.
            Self::DrainDonor => {}
            Self::StopVm => vm_host.signal(round.vm.pid(), libc::SIGSTOP)?,
            Self::CutLink => round.context.testbed.cut_link(1, 2)?,
            Self::LosePackets => shape(round, LOSS)?,
            Self::CorruptPackets => shape(round, CORRUPTION)?,
            Self::Trickle => shape(round, TRICKLE)?,
            Self::Reset => reset(round)?,
            Self::ClockOfVm => step_clock(vm_host, CLOCK_STEP_SECONDS)?,
            Self::ClockOfDonor => step_clock(donor_host, CLOCK_STEP_SECONDS)?,
            Self::FilesOfVm => {
                exhaust_files(vm_host, round.vm.pid())?;
                break_connections(round)?;
            }
            Self::FilesOfDonor => {
                exhaust_files(donor_host, round.target().pid())?;
                break_connections(round)?;
            }
            // dd fails when the file system is full, which is the purpose.
            Self::FullDisk => drop(vm_host.run(
                &[
                    "dd",
                    "if=/dev/zero",
                    &format!("of={}", round.filler()),
                    "bs=64k",
                ],
                SHORT,
            )?),
            Self::RdmaDevice => remove_rxe(vm_host)?,
        }
        Ok(())
    }

    /// Restores what [`inject`](Self::inject) broke.
    pub(super) fn heal(self, round: &Round<'_>) -> anyhow::Result<()> {
        let (vm_host, donor_host) = (round.vm_host(), round.donor_host());
        match self {
            Self::StopDonor | Self::FreezeDonor => {
                donor_host.signal(round.target().pid(), libc::SIGCONT)?;
            }
            // The VM continues with what other donors have.
            Self::LoseDonor | Self::DrainDonor => {}
            Self::StopVm => vm_host.signal(round.vm.pid(), libc::SIGCONT)?,
            Self::CutLink => round.context.testbed.restore_link(1, 2)?,
            Self::LosePackets | Self::CorruptPackets | Self::Trickle => {
                round.context.testbed.clear_netem()?;
            }
            Self::Reset => {}
            Self::ClockOfVm => step_clock(vm_host, -CLOCK_STEP_SECONDS)?,
            Self::ClockOfDonor => step_clock(donor_host, -CLOCK_STEP_SECONDS)?,
            Self::FilesOfVm => {
                restore_files(vm_host, round.vm.pid())?;
                restore_link(round)?;
            }
            Self::FilesOfDonor => {
                restore_files(donor_host, round.target().pid())?;
                restore_link(round)?;
            }
            Self::FullDisk => drop(vm_host.check(&["rm", "-f", round.filler()], SHORT)?),
            Self::RdmaDevice => add_rxe(vm_host)?,
        }
        Ok(())
    }

    /// How long it lasts: a part of `longest`, from a random number.
    pub(super) fn duration(self, random: u64, longest: Duration) -> Duration {
        match self {
            // A moment without duration.
            Self::Reset | Self::DrainDonor => Duration::ZERO,
            Self::FreezeDonor => FREEZE,
            _ => longest / 4 + longest * u32::try_from(random % 4).unwrap_or(0) / 4,
        }
    }
}

/// Shapes the link in both directions by a discipline of netem.
fn shape(round: &Round<'_>, discipline: &str) -> anyhow::Result<()> {
    for (from, to) in [(1, 2), (2, 1)] {
        let script = format!("tc qdisc replace dev link{to} root netem {discipline}");
        let host = round.context.testbed.host(from);
        host.check(&["sh", "-c", &script], SHORT)?;
    }
    Ok(())
}

/// Destroys the sockets of all connections to the donor.
fn reset(round: &Round<'_>) -> anyhow::Result<()> {
    let address = round.target().address();
    let (host, port) = address
        .split_once(':')
        .with_context(|| format!("no port in {address}"))?;
    let argv = ["ss", "-K", "dst", host, "dport", "=", port];
    round.vm_host().check(&argv, SHORT)?;
    Ok(())
}

/// Breaks the connections to the donor: by a reset, or over QUIC, which knows none, by a cut of the link.
fn break_connections(round: &Round<'_>) -> anyhow::Result<()> {
    match round.kind.transport {
        PageTransport::Udp => Ok(round.context.testbed.cut_link(1, 2)?),
        _ => reset(round),
    }
}

/// Restores the link if [`break_connections`] has cut it.
fn restore_link(round: &Round<'_>) -> anyhow::Result<()> {
    match round.kind.transport {
        PageTransport::Udp => Ok(round.context.testbed.restore_link(1, 2)?),
        _ => Ok(()),
    }
}

fn step_clock(host: &Host, seconds: i64) -> anyhow::Result<()> {
    let script = format!("date -s @$(($(date +%s)+({seconds})))");
    host.check(&["sh", "-c", &script], SHORT)?;
    Ok(())
}

fn exhaust_files(host: &Host, pid: i32) -> anyhow::Result<()> {
    let argv = ["prlimit", "--pid", &pid.to_string(), FILES_EXHAUSTED];
    host.check(&argv, SHORT)?;
    Ok(())
}

fn restore_files(host: &Host, pid: i32) -> anyhow::Result<()> {
    // The soft limit becomes the hard one, as the product itself sets it.
    let script = format!(
        "hard=$(prlimit --pid {pid} --nofile --noheadings --output HARD); \
         prlimit --pid {pid} --nofile=$hard:"
    );
    host.check(&["sh", "-c", &script], SHORT)?;
    Ok(())
}

/// A fault that ends the VM, and a round with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    /// The processes of all donors are killed.
    KillDonors,
    /// The VM's process is killed.
    KillVm,
    /// The VM's process is interrupted, as by Ctrl-C.
    Interrupt,
    /// The link is cut for longer than the grace time.
    Partition,
}

impl End {
    pub(super) const ALL: [Self; 4] = [
        Self::KillDonors,
        Self::KillVm,
        Self::Interrupt,
        Self::Partition,
    ];

    /// Its name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::KillDonors => "all donors killed",
            Self::KillVm => "VM killed",
            Self::Interrupt => "VM interrupted",
            Self::Partition => "link cut permanently",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::round::GRACE_SECONDS;
    use super::*;

    #[test]
    fn each_kind_has_the_faults_that_mean_something_to_it() {
        let of = |transport, replicas| {
            Fault::of(Kind {
                transport,
                replicas,
            })
        };
        let rdma = of(PageTransport::Rdma, Replicas::Two);
        assert_eq!(rdma.len(), Fault::ALL.len());
        let tcp = of(PageTransport::Tcp, Replicas::One);
        assert!(tcp.contains(&Fault::Reset) && !tcp.contains(&Fault::RdmaDevice));
        let udp = of(PageTransport::Udp, Replicas::One);
        assert!(!udp.contains(&Fault::Reset) && udp.contains(&Fault::LosePackets));
        for transport in PageTransport::ALL {
            let (one, two) = (of(transport, Replicas::One), of(transport, Replicas::Two));
            assert!(one.contains(&Fault::FilesOfVm) && one.contains(&Fault::FilesOfDonor));
            for fault in [Fault::LoseDonor, Fault::FreezeDonor, Fault::DrainDonor] {
                assert!(!one.contains(&fault) && two.contains(&fault), "{fault:?}");
            }
            assert_eq!(two.len(), one.len() + 3);
        }
    }

    #[test]
    fn names_fit_their_column_and_differ() {
        let mut names: Vec<_> = Fault::ALL.map(Fault::name).to_vec();
        names.extend(End::ALL.map(End::name));
        assert!(names.iter().all(|name| name.len() < 22), "{names:?}");
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_fault_lasts_no_longer_than_the_longest() {
        let longest = Duration::from_secs(4);
        for fault in Fault::ALL {
            // A donor is frozen for longer than the VM waits for it.
            if fault == Fault::FreezeDonor {
                assert!(fault.duration(0, longest) > Duration::from_secs(GRACE_SECONDS));
                continue;
            }
            for random in 0..8 {
                assert!(fault.duration(random, longest) <= longest, "{fault:?}");
            }
        }
        assert_eq!(Fault::Reset.duration(3, longest), Duration::ZERO);
    }
}
