//! A vCPU has used memory that is lost.

use std::sync::atomic::Ordering;

use super::machine_check::Stopped;
use super::{Step, Vcpu};
use crate::error::MachineError;
use crate::lifecycle::shared::Shared;
use crate::memory_errors;

/// Limit of machine checks for one page in succession. The guest's kernel unmaps the page at the
/// first; one that ignores them would use the page for ever.
const IN_SUCCESSION_MAX: u32 = 1000;

/// The last memory errors of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    page: u64,
    in_succession: u32,
    /// The page and the instruction of the last signal that led to no machine check yet.
    signalled: Option<(u64, u64)>,
}

impl Errors {
    /// Counts an error; returns how many were on this page in succession.
    fn count(&mut self, page: u64) -> u32 {
        if self.page != page {
            *self = Self::default();
        }
        self.page = page;
        self.in_succession += 1;
        self.in_succession
    }

    /// Notes a signal for a page at an instruction. Returns whether that instruction has used the
    /// page, which it has when the signal comes twice.
    ///
    /// KVM lets the guest handle interrupts while a page is on its way (asynchronous page faults),
    /// and signals the loss then, in the middle of such a handler. The kernel would take that for
    /// an error of its own. The instruction that waits for the page comes later.
    fn is_repeated(&mut self, page: u64, instruction: u64) -> bool {
        let now = Some((page, instruction));
        let is_repeated = self.signalled == now;
        self.signalled = now.filter(|_| !is_repeated);
        is_repeated
    }
}

impl Vcpu {
    /// Handles an error at an address of this process.
    pub(super) fn memory_error(&mut self, shared: &Shared, address: u64) -> Step {
        match memory_errors::guest_address(&shared.memory, address) {
            Some(address) => {
                let rip = self.rip();
                if self.errors.is_repeated(address.0 & !0xfff, rip) {
                    self.lost_page(shared, address.0, Stopped::Before)
                } else {
                    Step::Continue
                }
            }
            // The handler accepts no other address.
            None => self.crash(&format!("memory error at {address:#x} of the monitor")),
        }
    }

    /// Delivers a machine check for a guest-physical address.
    pub(super) fn lost_page(&mut self, shared: &Shared, address: u64, stopped: Stopped) -> Step {
        let page = address & !0xfff;
        let Some(machine_check) = self.machine_check else {
            return self.crash(&format!("memory error at {page:#x}"));
        };
        if self.errors.count(page) > IN_SUCCESSION_MAX {
            return self.crash(&format!(
                "use of the lost page at {page:#x} again and again: the guest's kernel does not \
                 handle machine checks, and this"
            ));
        }
        let delivered = self.handles_machine_checks().and_then(|handles| {
            if handles {
                machine_check.deliver(&self.fd, page, stopped)
            } else {
                Err(MachineError::NoMachineChecks { page })
            }
        });
        if let Err(error) = delivered {
            return Step::End(Err(error));
        }
        if let Some(errors) = &shared.memory_errors {
            // Relaxed: a number for reports.
            errors.machine_checks.fetch_add(1, Ordering::Relaxed);
        }
        Step::Continue
    }

    /// Returns whether the guest's kernel has enabled machine checks. KVM shuts a vCPU down that
    /// gets one before.
    fn handles_machine_checks(&self) -> Result<bool, MachineError> {
        const CR4_MCE: u64 = 1 << 6;
        let registers = self.fd.get_sregs();
        let registers = registers.map_err(|error| MachineError::Kvm {
            action: "read the control registers of a vCPU that used lost memory",
            source: error.into(),
        })?;
        Ok(registers.cr4 & CR4_MCE != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_on_one_page_are_in_succession() {
        let mut errors = Errors::default();
        assert_eq!(
            [1, 1, 2, 1].map(|page| errors.count(page << 12)),
            [1, 2, 1, 1]
        );
    }

    #[test]
    fn an_instruction_has_used_a_page_when_the_signal_comes_twice() {
        let mut errors = Errors::default();
        let signals = [(1, 7), (1, 8), (1, 8), (1, 8), (2, 8), (1, 8), (1, 8)];
        let used = signals.map(|(page, rip)| errors.is_repeated(page << 12, rip));
        assert_eq!(used, [false, false, true, false, false, false, true]);
    }
}
