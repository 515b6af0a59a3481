use proptest::prelude::*;

use super::*;
use crate::message::{DeliveryMode, Destination};
use crate::saved::InvalidState;

const SPURIOUS: u64 = 0xf0;
const ESR: u64 = 0x280;
const ICR_LOW: u64 = 0x300;
const ICR_HIGH: u64 = 0x310;
const LVT_TIMER_OFFSET: u64 = 0x320;
const LVT_LINT0_OFFSET: u64 = 0x350;
const LVT_ERROR_OFFSET: u64 = 0x370;
const INITIAL_COUNT: u64 = 0x380;
const CURRENT_COUNT: u64 = 0x390;
const DIVIDE: u64 = 0x3e0;

/// Writes a register as a CPU does in the mode of its local APIC.
fn write_at(apic: &mut LocalApic, offset: u64, value: u32, now: u64) -> Effect {
    match apic.mode() {
        Mode::X2Apic => apic
            .write_msr(msr(offset), value.into(), now)
            .expect("a register"),
        _ => apic.write_page(offset, &value.to_le_bytes(), now),
    }
}

fn write(apic: &mut LocalApic, offset: u64, value: u32) -> Effect {
    write_at(apic, offset, value, 0)
}

fn read_at(apic: &mut LocalApic, offset: u64, now: u64) -> u32 {
    if apic.mode() == Mode::X2Apic {
        let value = apic.read_msr(msr(offset), now).expect("a register");
        return u32::try_from(value).expect("32 bits");
    }
    let mut data = [0; 4];
    apic.read_page(offset, &mut data, now);
    u32::from_le_bytes(data)
}

fn read(apic: &mut LocalApic, offset: u64) -> u32 {
    read_at(apic, offset, 0)
}

fn msr(offset: u64) -> u32 {
    0x800 + u32::try_from(offset / 16).unwrap()
}

/// An enabled local APIC in each mode.
fn enabled() -> [LocalApic; 2] {
    [Mode::XApic, Mode::X2Apic].map(|mode| {
        let mut apic = LocalApic::new(3);
        apic.set_mode(mode);
        write(&mut apic, SPURIOUS, 0x1ff);
        apic
    })
}

fn end(apic: &mut LocalApic) -> Effect {
    write(apic, 0xb0, 0)
}

#[test]
fn after_reset_the_registers_are_those_of_the_manual() {
    let mut apic = LocalApic::new(3);
    assert_eq!(read(&mut apic, 0x20), 3 << 24);
    assert_eq!(read(&mut apic, 0x30), 0x5_0014);
    assert_eq!(read(&mut apic, 0xe0), u32::MAX);
    assert_eq!(read(&mut apic, SPURIOUS), 0xff);
    for offset in (0x320..=0x370).step_by(16) {
        assert_eq!(read(&mut apic, offset), 1 << 16, "masked");
    }
    apic.set_mode(Mode::X2Apic);
    assert_eq!(read(&mut apic, 0x20), 3);
    assert_eq!(read(&mut apic, 0xd0), 1 << 3);
    apic.set_up_inputs();
    assert_eq!(read(&mut apic, LVT_LINT0_OFFSET), 0x1_0700);
}

#[test]
fn one_that_is_not_enabled_takes_no_interrupts_and_keeps_its_masks() {
    let mut apic = LocalApic::new(0);
    apic.accept(0x40, Trigger::Edge);
    assert_eq!(apic.pending(), None);
    assert!(!apic.routing().enabled);
    write(&mut apic, LVT_TIMER_OFFSET, 0x40);
    assert_eq!(read(&mut apic, LVT_TIMER_OFFSET), 0x1_0040);
    write(&mut apic, SPURIOUS, 0x1ff);
    write(&mut apic, LVT_TIMER_OFFSET, 0x40);
    assert_eq!(read(&mut apic, LVT_TIMER_OFFSET), 0x40);
    write(&mut apic, SPURIOUS, 0xff);
    assert_eq!(read(&mut apic, LVT_TIMER_OFFSET), 0x1_0040);
}

#[test]
fn interrupts_are_served_by_priority_and_ended_in_reverse() {
    for mut apic in enabled() {
        for vector in [0x31, 0x52, 0x35] {
            apic.accept(vector, Trigger::Edge);
        }
        assert_eq!(apic.acknowledge(), Some(0x52));
        assert_eq!(apic.processor_priority(), 0x50);
        assert_eq!(read(&mut apic, 0xa0), 0x50);
        assert_eq!(apic.acknowledge(), None, "lower ones wait");
        apic.accept(0x58, Trigger::Edge);
        assert_eq!(apic.pending(), None, "the same class waits");
        apic.accept(0x60, Trigger::Edge);
        assert_eq!(apic.acknowledge(), Some(0x60));
        // In service: 0x52 and 0x60 are bits 18 and 0 of their words.
        assert_eq!(read(&mut apic, 0x120), 1 << 18);
        assert_eq!(read(&mut apic, 0x130), 1);
        assert_eq!(read(&mut apic, 0x210), 1 << 0x11 | 1 << 0x15);
        assert_eq!(end(&mut apic), Effect::None);
        assert_eq!(apic.pending(), None);
        end(&mut apic);
        assert_eq!(apic.acknowledge(), Some(0x58));
        end(&mut apic);
        assert_eq!(apic.acknowledge(), Some(0x35));
        end(&mut apic);
        assert_eq!(apic.acknowledge(), Some(0x31));
        end(&mut apic);
        assert_eq!(end(&mut apic), Effect::None, "one end too many");
    }
}

#[test]
fn the_task_priority_holds_back_its_class_and_those_below() {
    for mut apic in enabled() {
        apic.accept(0x45, Trigger::Edge);
        write(&mut apic, 0x80, 0x40);
        assert_eq!(apic.pending(), None);
        apic.set_cr8(3);
        assert_eq!(apic.task_priority(), 0x30);
        assert_eq!(apic.pending(), Some(0x45));
        // CR8 has the upper half only.
        write(&mut apic, 0x80, 0x3c);
        apic.set_cr8(3);
        assert_eq!(apic.task_priority(), 0x3c);
    }
}

#[test]
fn the_end_of_a_level_is_broadcast_and_that_of_an_edge_is_not() {
    for mut apic in enabled() {
        apic.accept(0x40, Trigger::Level);
        assert_eq!(read(&mut apic, 0x1a0), 1, "trigger mode");
        apic.acknowledge();
        // Again while it is served: it is requested once more.
        apic.accept(0x40, Trigger::Level);
        assert_eq!(end(&mut apic), Effect::EndOfInterrupt(0x40));
        assert_eq!(apic.acknowledge(), Some(0x40));
        end(&mut apic);
        apic.accept(0x40, Trigger::Edge);
        apic.acknowledge();
        assert_eq!(end(&mut apic), Effect::None);
    }
}

#[test]
fn the_command_register_sends() {
    let [mut xapic, mut x2apic] = enabled();
    write(&mut xapic, ICR_HIGH, 5 << 24);
    let Effect::Send(sent) = write(&mut xapic, ICR_LOW, 0x0000_4541) else {
        panic!("nothing sent")
    };
    assert_eq!(sent.destination, Destination::Physical(5));
    assert_eq!(sent.mode, DeliveryMode::Init);
    assert_eq!(read(&mut xapic, ICR_LOW), 0x4541);
    assert_eq!(read(&mut xapic, ICR_HIGH), 5 << 24);

    let sent = x2apic.write_msr(0x830, 5 << 32 | 0x40, 0).unwrap();
    let Effect::Send(sent) = sent else {
        panic!("nothing sent")
    };
    assert_eq!(sent.destination, Destination::Physical(5));
    assert_eq!(x2apic.read_msr(0x830, 0), Ok(5 << 32 | 0x40));
}

#[test]
fn illegal_vectors_are_errors_that_interrupt_if_asked() {
    for mut apic in enabled() {
        write(&mut apic, LVT_ERROR_OFFSET, 0xfe);
        assert_eq!(write(&mut apic, ICR_LOW, 0x0f), Effect::None);
        assert_eq!(apic.acknowledge(), Some(0xfe));
        assert_eq!(read(&mut apic, ESR), 0, "not written yet");
        write(&mut apic, ESR, 0);
        assert_eq!(read(&mut apic, ESR), 1 << 5);
        apic.accept(15, Trigger::Edge);
        write(&mut apic, ESR, 0);
        assert_eq!(read(&mut apic, ESR), 1 << 6);
        write(&mut apic, ESR, 0);
        assert_eq!(read(&mut apic, ESR), 0);
        end(&mut apic);
        assert_eq!(apic.acknowledge(), Some(0xfe), "the second error");
        end(&mut apic);
        // An error whose own vector is illegal.
        write(&mut apic, LVT_ERROR_OFFSET, 0x0e);
        apic.accept(15, Trigger::Edge);
        assert_eq!(apic.pending(), None);
    }
}

#[test]
fn the_page_has_registers_of_4_bytes_and_reports_others() {
    let [mut apic, _] = enabled();
    apic.write_page(0x80, &[0x20], 0);
    apic.write_page(0x84, &[0x20, 0, 0, 0], 0);
    assert_eq!(apic.task_priority(), 0, "not whole registers");
    let mut bytes = [0xee; 2];
    apic.read_page(0x32, &mut bytes, 0);
    assert_eq!(bytes, [5, 0]);
    let mut bytes = [0xee; 8];
    apic.read_page(0x30, &mut bytes, 0);
    assert_eq!(bytes, [0; 8], "wider than a register");
    // Reserved offsets, and a register that can only be read.
    write(&mut apic, 0x30, 7);
    write(&mut apic, ESR, 0);
    assert_eq!(read(&mut apic, ESR), 0);
    for offset in [0x0, 0x40, 0x3f0, 0xff0] {
        assert_eq!(read(&mut apic, offset), 0);
        write(&mut apic, ESR, 0);
        assert_eq!(read(&mut apic, ESR), 1 << 7, "{offset:#x}");
    }
}

#[test]
fn registers_that_x2apic_mode_does_not_have_are_refused() {
    let [mut xapic, mut x2apic] = enabled();
    assert!(xapic.read_msr(0x802, 0).is_err(), "in xAPIC mode");
    assert!(xapic.write_msr(0x80b, 0, 0).is_err());
    for msr in [0x800, 0x80e, 0x831, 0x80b, 0x83f, 0x8ff, 0x802 + 0x100] {
        assert!(x2apic.read_msr(msr, 0).is_err(), "{msr:#x}");
    }
    for (msr, value) in [
        (0x802, 1),
        (0x803, 0),
        (0x80d, 0),
        (0x80e, 0),
        (0x839, 0),
        (0x831, 0),
        (0x80b, 1),
        (0x828, 1),
        (0x808, 0x100),
        (0x80f, 0x1000),
        (0x83e, 4),
        (0x838, 1 << 32),
        (0x830, 1 << 20),
        (0x832, 1 << 18),
        (0x83f, 0x100),
    ] {
        assert!(x2apic.write_msr(msr, value, 0).is_err(), "{msr:#x}");
    }
    assert_eq!(x2apic.write_msr(0x83f, 0x77, 0), Ok(Effect::None));
    assert_eq!(x2apic.acknowledge(), Some(0x77));
}

#[test]
fn the_timer_interrupts_once_or_again_and_again() {
    for mut apic in enabled() {
        write(&mut apic, DIVIDE, 11);
        write(&mut apic, LVT_TIMER_OFFSET, 0x40);
        write_at(&mut apic, INITIAL_COUNT, 1_000_000, 500);
        assert_eq!(apic.deadline(), Some(1_000_500));
        assert_eq!(read_at(&mut apic, CURRENT_COUNT, 400_500), 600_000);
        apic.run_timer(1_000_499);
        assert_eq!(apic.pending(), None);
        apic.run_timer(1_000_500);
        assert_eq!(apic.acknowledge(), Some(0x40));
        assert_eq!(apic.deadline(), None);
        end(&mut apic);

        write(&mut apic, LVT_TIMER_OFFSET, 0x2_0041);
        write_at(&mut apic, INITIAL_COUNT, 1_000_000, 2_000_000);
        for round in 3..6 {
            apic.run_timer(round * 1_000_000);
            assert_eq!(apic.acknowledge(), Some(0x41));
            end(&mut apic);
        }
        assert_eq!(apic.deadline(), Some(6_000_000));
    }
}

#[test]
fn a_masked_timer_runs_without_interrupts() {
    for mut apic in enabled() {
        write(&mut apic, DIVIDE, 11);
        write(&mut apic, LVT_TIMER_OFFSET, 0x1_0040);
        write_at(&mut apic, INITIAL_COUNT, 1000, 0);
        assert_eq!(apic.deadline(), None);
        assert_eq!(read_at(&mut apic, CURRENT_COUNT, 1500), 0);
        assert_eq!(apic.pending(), None);
        // Unmasked after it has expired: that time is past.
        write_at(&mut apic, INITIAL_COUNT, 1000, 2000);
        write_at(&mut apic, LVT_TIMER_OFFSET, 0x40, 4000);
        apic.run_timer(5000);
        assert_eq!(apic.pending(), None);
    }
}

#[test]
fn a_reset_keeps_number_and_mode_alone() {
    for mut apic in enabled() {
        apic.accept(0x40, Trigger::Edge);
        write(&mut apic, 0x80, 0x30);
        let mode = apic.mode();
        apic.reset();
        assert_eq!((apic.mode(), apic.pending()), (mode, None));
        assert_eq!(apic.task_priority(), 0);
        assert!(!apic.routing().enabled);
        apic.set_mode(Mode::Disabled);
        assert_eq!(apic.mode(), Mode::Disabled);
    }
    assert_eq!(Mode::of_base(0xfee0_0900), Mode::XApic);
    assert_eq!(Mode::of_base(0xfee0_0c00), Mode::X2Apic);
    assert_eq!(Mode::of_base(0xfee0_0000), Mode::Disabled);
}

#[test]
fn a_state_that_was_not_saved_so_is_refused() {
    let [apic, _] = enabled();
    let good = apic.save(0);
    let refused = |change: &dyn Fn(&mut crate::LocalApicState)| {
        let mut state = good.clone();
        change(&mut state);
        LocalApic::restore(&state, 0).unwrap_err()
    };
    let error = refused(&|state| state.version = 2);
    assert_eq!(error, InvalidState::Version { found: 2 });
    refused(&|state| state.requested[0] = 1);
    refused(&|state| state.vector_table[0] = 1 << 18);
    refused(&|state| state.spurious = 1 << 12);
    refused(&|state| state.mode = 4);
}

proptest! {
    /// Whatever a guest writes, the state can be saved and restored, and nothing below vector 16 is
    /// ever given to the CPU.
    #[test]
    fn any_guest_leaves_a_valid_state(
        x2apic: bool,
        steps in proptest::collection::vec(
            (0_u64..0x40, any::<u32>(), any::<u8>(), any::<bool>(), 0_u64..5_000_000),
            0..60,
        ),
    ) {
        let [xapic, of_msrs] = enabled();
        let mut apic = if x2apic { of_msrs } else { xapic };
        let mut now = 0;
        for (register, value, vector, level, time) in steps {
            now += time;
            if x2apic {
                let msr = 0x800 + u32::try_from(register).unwrap();
                let _ = apic.write_msr(msr, value.into(), now);
                let _ = apic.read_msr(msr, now);
            } else {
                apic.write_page(register * 16, &value.to_le_bytes(), now);
                apic.read_page(register * 16, &mut [0; 4], now);
            }
            apic.accept(vector, if level { Trigger::Level } else { Trigger::Edge });
            apic.run_timer(now);
            let before = apic.processor_priority();
            if let Some(taken) = apic.acknowledge() {
                prop_assert!(taken >= 16 && taken >> 4 > before >> 4);
            }
            let state = apic.save(now);
            let restored = LocalApic::restore(&state, now);
            prop_assert_eq!(restored.as_ref(), Ok(&apic));
        }
    }
}
