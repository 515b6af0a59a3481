use proptest::prelude::*;

use super::*;

fn messages() -> Vec<Message> {
    let interrupt = |vector, trigger| Event::Interrupt { vector, trigger };
    let events = [
        interrupt(5, Trigger::Edge),
        interrupt(255, Trigger::Level),
        Event::Nmi,
        Event::Init,
        Event::Startup { page: 9 },
    ];
    let mut all: Vec<_> = events
        .map(|event| Message::Event { cpu: 253, event })
        .into();
    let access = Access {
        space: Space::Ports,
        address: 0x3f8,
        len: 1,
        write: None,
    };
    let wide = Access {
        space: Space::Memory,
        address: u64::MAX,
        len: 8,
        write: Some([1, 2, 3, 4, 5, 6, 7, 8]),
    };
    all.extend([access, wide].map(|access| Message::Access { call: 7, access }));
    let ends = [
        End::Shutdown,
        End::Reboot,
        End::Stopped,
        End::Crash("triple fault".into()),
        End::Failed(String::new()),
        End::DonorLost("on node 2".into()),
        End::NodeLost {
            node: 2,
            reason: "silent".into(),
        },
    ];
    all.extend(ends.map(Message::End));
    all.extend([
        Message::Hello {
            version: 3,
            vm: [9; 16],
            node: 2,
        },
        Message::Routing {
            call: 8,
            cpu: 1,
            routing: Routing {
                logical: 0x1234_5678,
                x2apic: true,
                ..Routing::default()
            },
        },
        Message::EndOfInterrupt { vector: 0x31 },
        Message::Answer {
            call: u32::MAX,
            data: [8; 8],
        },
        Message::Start(Start {
            owners: vec![0, 1, 1],
            memory_bytes: 1 << 40,
            hotplug_bytes: 5,
            tsc_khz: 2_000_000,
            tsc_offset: u64::MAX,
            emulated: true,
            package_id_bits: 7,
            cpuid: vec![CpuidEntry::default(); 256],
        }),
        Message::Started,
        Message::Pause { number: 1 },
        Message::Paused { number: 2 },
        Message::Resume,
        Message::Ended,
        Message::Alive,
        Message::Report(vec![7; 1000]),
        Message::Move { cpu: 3, to: 2 },
        Message::Moved {
            call: 1,
            cpu: 253,
            to: 7,
        },
        Message::Vcpu {
            cpu: 1,
            state: vec![5; VCPU_STATE_BYTES_MAX],
        },
        Message::Arrived { cpu: 3 },
        Message::ClockAsk { number: 3 },
        Message::ClockAnswer {
            number: 3,
            ticks: 1 << 60,
        },
    ]);
    all
}

#[test]
fn every_message_is_read_as_it_was_written() {
    for message in messages() {
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        for part in 0..bytes.len() {
            assert_eq!(decode(&bytes[..part]), Ok(None), "{message:?}");
        }
        let len = bytes.len();
        bytes.push(0xff);
        assert_eq!(decode(&bytes), Ok(Some((message, len))));
    }
}

#[test]
fn a_frame_that_is_too_long_or_short_is_malformed() {
    for message in messages() {
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        let mut longer = bytes.clone();
        longer.push(1);
        longer[..2].copy_from_slice(&u16::try_from(bytes.len() - 1).unwrap().to_le_bytes());
        let is_text = matches!(
            message,
            Message::End(End::Crash(_) | End::Failed(_) | End::DonorLost(_) | End::NodeLost { .. })
                | Message::Report(_)
        ) || matches!(
            &message,
            Message::Vcpu { state, .. } if state.len() < VCPU_STATE_BYTES_MAX
        );
        let read = matches!(message, Message::Access { access, .. } if access.write.is_none());
        assert_eq!(decode(&longer).is_err(), !is_text || read, "{message:?}");
    }
    assert_eq!(decode(&[1, 0, 99]), Err(Malformed { kind: 99 }));
    assert_eq!(decode(&[0, 0]), Err(Malformed { kind: 0 }));
}

#[test]
fn a_report_that_is_too_long_is_refused() {
    let frame = |len: usize| {
        let mut bytes = u16::try_from(1 + len).unwrap().to_le_bytes().to_vec();
        bytes.push(REPORT);
        bytes.resize(3 + len, 0);
        decode(&bytes).is_ok()
    };
    assert_eq!(
        [REPORT_BYTES_MAX, REPORT_BYTES_MAX + 1].map(frame),
        [true, false]
    );
    let mut bytes = Vec::new();
    encode(&Message::Report(vec![0; 1 << 20]), &mut bytes);
    assert_eq!(bytes.len(), 3 + REPORT_BYTES_MAX);
}

#[test]
fn a_long_text_is_cut_between_characters() {
    let text = "\u{20ac}".repeat(1000);
    let mut bytes = Vec::new();
    encode(&Message::End(End::Crash(text)), &mut bytes);
    let Ok(Some((Message::End(End::Crash(text)), _))) = decode(&bytes) else {
        panic!("not a crash")
    };
    assert_eq!(text.len(), 1023);
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(
        kind: u8,
        fields in proptest::collection::vec(any::<u8>(), 0..200),
        cut in 0_usize..200,
    ) {
        let mut bytes = u16::try_from(1 + fields.len()).unwrap().to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(fields);
        is_read_or_refused(&bytes)?;
        is_read_or_refused(&bytes[..cut.min(bytes.len())])?;
    }

    #[test]
    fn messages_with_other_bytes_are_read_or_refused(
        number: prop::sample::Index,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = Vec::new();
        encode(number.get(&messages()), &mut bytes);
        for (at, byte) in changes {
            *at.get_mut(&mut bytes) = byte;
        }
        is_read_or_refused(&bytes)?;
    }
}

fn is_read_or_refused(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(Some((message, len))) = decode(bytes) {
        let mut again = Vec::new();
        encode(&message, &mut again);
        // Flags of a routing that are not known are dropped.
        prop_assert_eq!(again.len(), len);
    }
    Ok(())
}
