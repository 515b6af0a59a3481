//! On which CPUs the threads of a measurement run: the same ones for the product and its floor.

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// The CPUs of the pager, and those of donors and of the threads that touch memory: a half of what
/// this process may use each, so that no thread of a fault has to wait for another of its own end.
/// With a single CPU all share it. Threads inherit their CPUs from the one that starts them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Placement {
    pager: Vec<usize>,
    others: Vec<usize>,
}

/// The CPUs that the calling thread may use.
fn allowed() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the allowed CPUs")?;
    let all = 0..CpuSet::MAX_CPU;
    Ok(all.filter(|&cpu| allowed.is_set(cpu)).collect())
}

/// The CPUs of each of some nodes, which have none in common as long as there are enough: they stand
/// for hosts.
pub(super) fn of_nodes(nodes: usize) -> Result<Vec<Vec<usize>>> {
    Ok(divided(&allowed()?, nodes))
}

fn divided(cpus: &[usize], nodes: usize) -> Vec<Vec<usize>> {
    let of = |node: usize| {
        let first = node % cpus.len().max(1);
        cpus.iter().skip(first).step_by(nodes).copied().collect()
    };
    (0..nodes).map(of).collect()
}

impl Placement {
    pub(super) fn new() -> Result<Self> {
        Ok(Self::of(allowed()?))
    }

    fn of(mut cpus: Vec<usize>) -> Self {
        let pager = if cpus.len() > 1 {
            cpus.split_off(cpus.len() / 2)
        } else {
            cpus.clone()
        };
        Self {
            pager,
            others: cpus,
        }
    }

    /// Moves the calling thread to the CPUs of the pager.
    pub(super) fn pager(&self) -> Result<()> {
        use_only(&self.pager)
    }

    /// Moves the calling thread to the CPUs of donors and of threads that touch memory.
    pub(super) fn others(&self) -> Result<()> {
        use_only(&self.others)
    }

    /// Lets the calling thread use all CPUs again.
    pub(super) fn everywhere(&self) -> Result<()> {
        use_only(&[&self.pager[..], &self.others].concat())
    }
}

/// Moves the calling thread, and those that it starts, to these CPUs.
pub(super) fn use_only(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on CPUs {cpus:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pager_has_half_of_the_cpus() {
        for (all, others, pager) in [
            (vec![7], vec![7], vec![7]),
            (vec![2, 5], vec![2], vec![5]),
            (vec![0, 1, 2, 3, 4], vec![0, 1], vec![2, 3, 4]),
        ] {
            assert_eq!(Placement::of(all), Placement { pager, others });
        }
    }

    #[test]
    fn nodes_share_no_cpu_if_there_are_enough() {
        for (cpus, nodes, expected) in [
            (vec![2, 5], 2, vec![vec![2], vec![5]]),
            (vec![0, 1, 2, 3, 4], 2, vec![vec![0, 2, 4], vec![1, 3]]),
            (vec![0, 1], 3, vec![vec![0], vec![1], vec![0]]),
            (vec![7], 2, vec![vec![7], vec![7]]),
        ] {
            assert_eq!(divided(&cpus, nodes), expected);
        }
    }

    #[test]
    fn threads_inherit_their_cpus() {
        let placement = Placement::new().expect("CPUs");
        let inherited = std::thread::spawn(move || {
            placement.pager().expect("allowed");
            let set = std::thread::spawn(|| sched_getaffinity(None).expect("CPUs"));
            let set = set.join().expect("it ends");
            placement.pager.iter().all(|&cpu| set.is_set(cpu))
                && set.count() as usize == placement.pager.len()
        });
        assert!(inherited.join().expect("it ends"));
    }
}
