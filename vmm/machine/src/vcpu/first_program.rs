//! Whether a guest that reports nothing runs a program: a vCPU is seen in user mode. Its timer has it
//! leave the guest often enough.

use devices::BootEvent;
use kvm_bindings::kvm_sregs;

use super::Vcpu;

/// Protected mode, in CR0.
const CR0_PE: u64 = 1;
/// The privilege level of user mode.
const USER: u8 = 3;

impl Vcpu {
    /// Looks where the guest was when the vCPU left it, if somebody waits for that.
    pub(super) fn look_for_program(&mut self) {
        let Some(boot) = &self.first_program else {
            return;
        };
        if !boot.has_happened(BootEvent::Init) {
            // Without the registers the next exit shows it, or the guest reports it.
            match self.fd.get_sregs() {
                Ok(registers) if is_in_user_mode(&registers) => boot.program_seen(),
                _ => return,
            }
        }
        self.first_program = None;
    }
}

/// The privilege level is that of the stack segment. In real mode it has no meaning.
const fn is_in_user_mode(registers: &kvm_sregs) -> bool {
    registers.cr0 & CR0_PE != 0 && registers.ss.dpl == USER
}
