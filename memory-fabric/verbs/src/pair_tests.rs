//! Tests of queue pairs.

use super::PairState::*;
use super::*;
use crate::batch::Place;

#[test]
fn states_follow_each_other_in_one_order_and_error_from_everywhere() {
    let all = [Reset, Init, ReadyToReceive, ReadyToSend, Error];
    for (place, from) in all.into_iter().enumerate() {
        for (other, to) in all.into_iter().enumerate() {
            let wanted = to == Error || (other == place + 1 && to != Error);
            assert_eq!(from.may_become(to), wanted, "{from:?} to {to:?}");
        }
    }
}

#[test]
fn a_batch_is_one_chain_and_only_reads_are_signalled() {
    let mut batch = Batch::new(3, 17);
    let mut chain = Chain::new(3, 220);
    for _ in 0..2 {
        let place = |address| Place {
            address,
            bytes: 4096,
            key: 5,
        };
        batch.write(1, 0x1000, place(0x10));
        batch.read(2, 0x2000, place(0x20));
        assert_eq!(batch.len(), 2);
        let first = chain.build(&mut batch);
        assert_eq!(batch.len(), 0);
        // SAFETY: the chain is valid until the next is built.
        unsafe {
            let second = (*first).next;
            assert_eq!(((*first).wr_id, (*second).wr_id), (1, 2));
            assert_eq!((*first).send_flags, 0);
            assert_eq!((*second).send_flags, ibv_send_flags::IBV_SEND_SIGNALED.0);
            let remote = (*second).wr.rdma;
            assert_eq!((remote.remote_addr, remote.rkey), (0x2000, 17));
            let part = *(*second).sg_list;
            assert_eq!((part.addr, part.length, part.lkey), (0x20, 4096, 5));
            assert!((*second).next.is_null());
        }
    }
}

#[test]
fn packet_numbers_have_24_bits_and_differ() {
    let numbers: Vec<_> = (0..8)
        .map(|_| random_packet_number().expect("a number"))
        .collect();
    assert!(numbers.iter().all(|&number| number <= NUMBER_MAX));
    assert!(numbers.iter().any(|number| *number != numbers[0]));
}

#[test]
fn a_write_that_notifies_has_its_value_in_network_order_and_a_completion() {
    let place = Place {
        address: 0x10,
        bytes: 64,
        key: 5,
    };
    let mut batch = Batch::new(1, 17);
    batch.write_notifying(9, 0x1000, place, 0x0102_0304);
    assert!(batch.only_writes());
    let mut chain = Chain::new(1, 0);
    let first = chain.build(&mut batch);
    // SAFETY: the chain is valid until the next is built.
    unsafe {
        assert_eq!((*first).opcode, ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
        assert_eq!((*first).send_flags, ibv_send_flags::IBV_SEND_SIGNALED.0);
        let value = (*first).imm_data_invalidated_rkey_union.imm_data;
        assert_eq!(value.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!((*(*first).sg_list).length, 64);
    }
    batch.write_notifying(9, 0x1000, Place { bytes: 0, ..place }, 1);
    let first = chain.build(&mut batch);
    // SAFETY: as above.
    assert_eq!(unsafe { (*first).num_sge }, 0, "nothing is read");
    batch.read(1, 0x1000, place);
    assert!(!batch.only_writes());
}

#[test]
fn only_writes_of_few_bytes_carry_them() {
    let flags = |limit, bytes, add: &dyn Fn(&mut Batch, Place)| {
        let mut batch = Batch::new(1, 17);
        let place = Place {
            address: 0x10,
            bytes,
            key: 5,
        };
        add(&mut batch, place);
        let mut chain = Chain::new(1, limit);
        let first = chain.build(&mut batch);
        // SAFETY: the chain is valid until the next is built.
        let (flags, parts) = unsafe { ((*first).send_flags, (*first).num_sge) };
        assert_eq!(parts, (bytes > 0).into(), "the bytes are named in any case");
        flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0
    };
    let note = |batch: &mut Batch, place| batch.write_notifying(1, 0x1000, place, 7);
    let write = |batch: &mut Batch, place| batch.write(1, 0x1000, place);
    let read = |batch: &mut Batch, place| batch.read(1, 0x1000, place);
    for add in [&note as &dyn Fn(&mut Batch, Place), &write] {
        assert!(flags(220, 1, add) && flags(220, 220, add));
        assert!(!flags(220, 221, add) && !flags(220, 4096, add));
        assert!(!flags(220, 0, add) && !flags(0, 1, add));
    }
    assert!(!flags(220, 8, &read), "a READ has nothing to carry");
}

#[test]
fn an_adapter_that_takes_fewer_bytes_than_asked_is_used_with_those() {
    // What an adapter takes at most, and how many it gives when asked for some.
    let adapter = |most: u32, gives: fn(u32) -> u32| {
        let mut asked = Vec::new();
        let created = with_inline(220, |bytes| {
            asked.push(bytes);
            match bytes <= most {
                true => Ok(((), gives(bytes))),
                false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            }
        });
        (created.expect("created").1, asked)
    };
    assert_eq!(adapter(512, |bytes| bytes), (220, vec![220]));
    assert_eq!(adapter(512, |_| 492), (220, vec![220]), "no more is used");
    assert_eq!(adapter(512, |_| 64), (64, vec![220]), "it rounds down");
    assert_eq!(adapter(60, |bytes| bytes), (55, vec![220, 110, 55]));
    assert_eq!(adapter(0, |_| 0), (0, vec![220, 110, 55, 27, 0]));
}

#[test]
fn a_queue_pair_that_cannot_be_created_is_an_error_after_the_try_without_bytes() {
    for asked in [0, 1, 1024] {
        let mut last = None;
        let created = with_inline::<()>(asked, |bytes| {
            last = Some(bytes);
            Err(io::Error::from_raw_os_error(libc::ENOMEM))
        });
        let error = created.expect_err("no memory");
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(last, Some(0));
    }
}
