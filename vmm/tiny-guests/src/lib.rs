//! Guests of a few instructions for tests, which run even under a software KVM.
//!
//! Each is loaded at [`ENTRY`] and does not return. Its module's function `code` returns its bytes.

#[macro_use]
mod assembler;
#[macro_use]
pub mod apic;
mod console;
mod elf;
mod exec;
mod machine;
pub mod moves;
pub mod nodes;
mod virtio;
mod walk;
mod xsave;

pub use console::{echo_until_q, hello, panics, talk_for_ever};
pub use elf::{ENTRY, elf};
pub use exec::{exec_and_stay, exec_garbled, exec_result};
pub use machine::{
    halt_for_ever, init_reached, is_tsc_invariant, keyboard_reset, reset_register,
    run_where_no_memory_is, second_cpu, touch_absent_page, triple_fault, unknown_port,
    wait_for_timer,
};
pub use virtio::{read_two_disks, reboot_until_c, report_free_pages};
pub use walk::{
    count_and_walk, count_for_ever, count_until_power_button, talk_and_walk, walk_and_check,
    walk_for_ever, walk_until_power_button, wander,
};
pub use xsave::save_state;
