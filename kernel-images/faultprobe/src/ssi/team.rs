//! Threads that are pinned to a CPU each, and what they wait for.

use std::hint::spin_loop;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpu::now_ticks;

/// More CPUs than this are not used: a result has a few bytes for each.
pub const CPUS_MAX: usize = 64;
/// How often a condition is tested before the CPU is offered to other threads.
const SPINS: u32 = 2000;

/// Returns the CPUs that this process may use, at most [`CPUS_MAX`].
///
/// # Errors
/// Fails when the kernel does not say.
pub fn cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    let all = 0..CpuSet::MAX_CPU;
    Ok(all.filter(|&cpu| set.is_set(cpu)).take(CPUS_MAX).collect())
}

/// Keeps the calling thread on a CPU.
///
/// # Errors
/// Fails when the CPU is offline or not allowed.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// A time, by the counter of the CPU that asks.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    begin: u64,
    ticks: u64,
}

impl Deadline {
    /// Returns the time after so many ticks.
    pub fn after(ticks: u64) -> Self {
        Self {
            begin: now_ticks(),
            ticks,
        }
    }

    /// Returns this time and so many ticks more.
    pub fn later(&self, ticks: u64) -> Self {
        Self {
            begin: self.begin,
            ticks: self.ticks.saturating_add(ticks),
        }
    }

    /// Returns the ticks since it was set.
    #[inline]
    pub fn elapsed(&self) -> u64 {
        now_ticks().saturating_sub(self.begin)
    }

    /// Returns whether it has passed.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.elapsed() >= self.ticks
    }

    /// Spins until a condition holds, and returns false if the deadline passes before.
    #[inline]
    pub fn wait(&self, mut is_true: impl FnMut() -> bool) -> bool {
        loop {
            for spin in 0..SPINS {
                if is_true() {
                    return true;
                }
                if spin % 64 == 63 && self.is_over() {
                    return is_true();
                }
                spin_loop();
            }
            // Another process may have taken the CPU of whoever is awaited.
            thread::yield_now();
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// One thread on each CPU. They sleep until they are given work.
#[derive(Debug)]
pub struct Team {
    jobs: Vec<Sender<Job>>,
}

impl Team {
    /// Starts a thread on each of the CPUs.
    ///
    /// # Errors
    /// Fails when a thread cannot be started or pinned.
    pub fn on(cpus: &[usize]) -> io::Result<Self> {
        let (told, ready) = mpsc::channel();
        let mut jobs = Vec::new();
        for &cpu in cpus {
            let (sender, receiver) = mpsc::channel::<Job>();
            let told = told.clone();
            thread::Builder::new()
                .name(format!("cpu{cpu}"))
                .spawn(move || {
                    let pinned = pin(cpu);
                    let is_pinned = pinned.is_ok();
                    if told.send(pinned).is_ok() && is_pinned {
                        receiver.iter().for_each(|job| job());
                    }
                })?;
            jobs.push(sender);
        }
        drop(told);
        for _ in cpus {
            ready.recv().map_err(io::Error::other)??;
        }
        Ok(Self { jobs })
    }

    /// Returns the number of threads.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Returns whether there is no thread.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Calls `work` with 0, 1, ... on the threads of `who`, all at the same time, and returns the
    /// results in that order.
    ///
    /// # Errors
    /// Fails when a thread panicked, now or in earlier work.
    pub fn run<T, F>(&self, who: &[usize], work: F) -> Result<Vec<T>, String>
    where
        T: Send + 'static,
        F: Fn(usize) -> T + Send + Sync + 'static,
    {
        let (work, arrived) = (Arc::new(work), Arc::new(AtomicUsize::new(0)));
        let (sender, results) = mpsc::channel();
        let count = who.len();
        for (role, &thread) in who.iter().enumerate() {
            let (work, arrived, sender) = (work.clone(), arrived.clone(), sender.clone());
            let job = move || {
                // Pairs with the others' additions: nobody begins before all are running.
                arrived.fetch_add(1, Ordering::AcqRel);
                let forever = Deadline::after(u64::MAX);
                forever.wait(|| arrived.load(Ordering::Acquire) >= count);
                let result = work(role);
                // The receiver ends with an error before this only if another thread panicked.
                let _ = sender.send((role, result));
            };
            let jobs = self.jobs.get(thread).ok_or("no such thread")?;
            jobs.send(Box::new(job))
                .map_err(|_| "a thread of the probe ended")?;
        }
        drop(sender);
        let mut results: Vec<(usize, T)> = results.iter().collect();
        if results.len() < count {
            return Err("a thread of the probe panicked".to_owned());
        }
        results.sort_by_key(|(role, _)| *role);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_works_on_its_cpu_at_the_same_time() {
        let cpus = cpus().unwrap();
        let team = Team::on(&cpus).unwrap();
        let who: Vec<usize> = (0..team.len()).collect();
        let arrived = AtomicUsize::new(0);
        let count = who.len();
        let on = team.run(&who, move |role| {
            arrived.fetch_add(1, Ordering::AcqRel);
            let all = || arrived.load(Ordering::Acquire) == count;
            assert!(Deadline::after(u64::MAX).wait(all));
            (role, rustix::thread::sched_getcpu())
        });
        let expected: Vec<_> = cpus.into_iter().enumerate().collect();
        assert_eq!(on.unwrap(), expected);
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_a_panic_is_an_error() {
        assert!(!Deadline::after(1_000_000).wait(|| false));
        let team = Team::on(&cpus().unwrap()[..1]).unwrap();
        let result = team.run(&[0], |_| {
            assert!(std::env::args().count() == 0, "as tested")
        });
        assert!(result.unwrap_err().contains("panicked"));
        assert!(team.run(&[0], |_| ()).is_err());
    }

    #[test]
    fn a_cpu_that_is_not_there_is_refused() {
        assert!(Team::on(&[CpuSet::MAX_CPU - 1]).is_err());
    }
}
